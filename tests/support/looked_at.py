# SPDX-License-Identifier: Apache-2.0
"""Runs ``kvcached-nixl top --json`` as an operator would."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

MOST_SECONDS = 60.0


def looked_at(*urls: str, interval_seconds: float = 1.0) -> tuple[int, dict[str, Any]]:
    """Returns the exit status, and what was found."""
    command = [sys.executable, "-m", "kvcached_nixl", "top", "--json", "--interval", str(interval_seconds), *urls]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=MOST_SECONDS)
    assert not done.stderr, done.stderr
    return done.returncode, json.loads(done.stdout)
