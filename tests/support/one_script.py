# SPDX-License-Identifier: Apache-2.0
"""Run by test_names.py: an engine inside a script, and a second one beside it. argv: a folder with a model.

Reads prompts and a number of tokens as JSON from standard input, and prints the result as a line of JSON.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

from vllm import LLM, SamplingParams

from kvcached_nixl.errors import NameRefused


def engine(model: str) -> LLM:
    return LLM(
        model=model,
        dtype="float32",
        enforce_eager=True,
        block_size=32,
        max_model_len=2048,
        max_num_batched_tokens=512,
        num_gpu_blocks_override=320,
        distributed_executor_backend="mp",
        seed=0,
    )


def answers(llm: LLM, prompts: list[list[int]], tokens: int) -> list[list[int]]:
    asked = SamplingParams(temperature=0.0, max_tokens=tokens, ignore_eos=True)
    done = llm.generate([{"prompt_token_ids": prompt} for prompt in prompts], asked, use_tqdm=False)
    return [list(one.outputs[0].token_ids) for one in done]


def inside(model: str, prompts: list[list[int]], tokens: int) -> dict[str, Any]:
    """Runs an engine in this process and tries to start a second one beside it."""
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    first = engine(model)
    try:
        engine(model)
    except NameRefused as cause:
        refused = str(cause)
    found = answers(first, prompts, tokens)
    first.llm_engine.engine_core.shutdown()
    left = [str(path) for path in Path("/tmp").glob(f"kvcached-tp-{os.environ['KVCACHED_IPC_NAME']}*")]
    return {"answers": [found], "refused": refused, "left": left}


if __name__ == "__main__":
    (model,) = sys.argv[1:]
    prompts, tokens = json.load(sys.stdin)
    print(json.dumps(inside(model, prompts, tokens)), flush=True)
