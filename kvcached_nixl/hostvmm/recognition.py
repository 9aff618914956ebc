# SPDX-License-Identifier: Apache-2.0
"""Distinguishes kvcached on host memory from a build for a GPU, without importing it."""

from __future__ import annotations

import importlib.metadata
from email.parser import HeaderParser

BUILD_TAG = "1hostvmm"
"""The wheel build tag (PEP 427) that `build` gives kvcached. It is part of the installed metadata, so it disappears
when that kvcached is replaced or removed."""


def is_hostvmm_build() -> bool:
    """Whether the installed kvcached is the build on host memory. Reads one metadata file."""
    try:
        wheel = importlib.metadata.distribution("kvcached").read_text("WHEEL")
    except importlib.metadata.PackageNotFoundError:
        return False
    return wheel is not None and HeaderParser().parsestr(wheel).get("Build") == BUILD_TAG
