# SPDX-License-Identifier: Apache-2.0
"""The version of vLLM that experiments use without ``--vllm``; must be the same as in experiments/run.sh."""

from __future__ import annotations

import os

DEFAULT_VLLM = (os.environ.get("KVCACHED_NIXL_VLLM") or "0.28.0").split()[-1]
