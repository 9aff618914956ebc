# SPDX-License-Identifier: Apache-2.0
"""The command beside a real server: it asks prefill as decode would."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("kvcached", reason="needs an environment: bash experiments/env.sh")
from experiments.common.servers import running
from experiments.lease_recovery.arms import PULL

MOST_SECONDS = 120.0


def command(*arguments: str) -> subprocess.CompletedProcess[str]:
    words = [sys.executable, "-m", "kvcached_nixl", *arguments]
    return subprocess.run(words, capture_output=True, text=True, check=False, timeout=MOST_SECONDS)


def test_prefill_is_asked(tmp_path: Path) -> None:
    with running([PULL.specs("fail")[0]], tmp_path) as (prefill,):
        done = command("doctor", "--json", "--prefill", prefill.base_url)
        (found,) = json.loads(done.stdout)
        assert done.returncode == 0 and found["why_not"] is None, done.stdout + done.stderr
        assert found["transfer_mode"] == "pull" and found["/health"] == "200"
