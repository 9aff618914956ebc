# SPDX-License-Identifier: Apache-2.0
"""The command beside real servers: it asks prefill as decode would, and shows both."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import httpx
import pytest

pytest.importorskip("kvcached", reason="needs an environment: bash experiments/env.sh")
from experiments.common.servers import asking
from experiments.lease_recovery.arms import PULL, prompts

MOST_SECONDS = 120.0


def command(*arguments: str) -> subprocess.CompletedProcess[str]:
    words = [sys.executable, "-m", "kvcached_nixl", *arguments]
    return subprocess.run(words, capture_output=True, text=True, check=False, timeout=MOST_SECONDS)


def test_a_pair_is_asked_and_shown(tmp_path: Path) -> None:
    with asking([PULL.specs("fail")[0]], PULL.specs("fail")[1], tmp_path) as (prefills, decode):
        (prefill,) = prefills.servers
        done = command("doctor", "--json", "--prefill", prefill.base_url)
        (found,) = json.loads(done.stdout)
        assert done.returncode == 0 and found["why_not"] is None, done.stdout + done.stderr
        assert found["transfer_mode"] == "pull" and found["/health"] == "200"
        body = {"model": "model", "prompt": prompts(1, seed=2)[0], "max_tokens": 4}
        assert httpx.post(f"{decode.base_url}/v1/completions", json=body, timeout=MOST_SECONDS).status_code == 200
        done = command("top", "--once", prefill.base_url, decode.base_url)
        assert (done.returncode, done.stderr) == (0, ""), done.stdout
        words = [line.split()[:2] for line in done.stdout.splitlines()]
        assert [prefill.base_url, "prefill"] in words and [decode.base_url, "decode"] in words
