# SPDX-License-Identifier: Apache-2.0
"""Ids of parametrized tests that stay the same when one process collects them again, as mutation testing does.

pytest escapes backslashes at each collection, so a test whose id has one would not be found under its first id.
"""

from __future__ import annotations

__all__ = ["plain_id"]


def plain_id(value: object) -> str:
    """Returns the beginning of the value's representation, without backslashes."""
    return ascii(value[:20] if isinstance(value, bytes) else value)[:200].replace("\\", "/")
