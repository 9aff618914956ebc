# SPDX-License-Identifier: Apache-2.0
"""vLLM's CPU worker on kvcached's host memory: the same tokens as without it, in both layouts, and clear refusals."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import uuid
from collections.abc import Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from hostvmm import is_hostvmm_build

from experiments.common import device
from experiments.common.servers import ENVIRONMENT, SERVER_SIDE, UNIPROC
from kvcached_nixl.vllm.adapter.versions import BEYOND_KVCACHED, LOADS_BEHIND, found_version, row_of

MODEL = """
import sys, torch
from transformers import Qwen2Config, Qwen2ForCausalLM
# 8 KiB of KV per token and layer: a page of kvcached holds the K or V of 512 tokens.
config = Qwen2Config(vocab_size=512, hidden_size=1024, intermediate_size=512, num_hidden_layers=2,
                     num_attention_heads=8, num_key_value_heads=8, max_position_embeddings=2048,
                     tie_word_embeddings=False)
torch.manual_seed(0)
model = Qwen2ForCausalLM(config).float()
with torch.no_grad():
    for name, parameter in model.named_parameters():
        if "norm" not in name:
            parameter.normal_(0, 0.05)
model.save_pretrained(sys.argv[1])
"""
ENGINE = f"""
import json, sys
from hostvmm.device import device_info
if __name__ == "__main__":
    from vllm import LLM, SamplingParams
    options = dict(max_model_len=1024) | json.loads(sys.argv[2])
    llm = LLM(sys.argv[1], skip_tokenizer_init=True, enforce_eager=True, block_size=32, dtype="float32", seed=0,
              disable_log_stats=True, distributed_executor_backend={UNIPROC!r}, **options)
    def prompt(i, round):
        return dict(prompt_token_ids=[(7 * i + 13 * round + k * k) % 500 for k in range(90 * i + 40)])
    ask = SamplingParams(temperature=0, max_tokens=24, detokenize=False, ignore_eos=True)
    tokens, uses = [], []
    for round in range(3):
        answers = llm.generate([prompt(i, round) for i in range(9)], ask, use_tqdm=False)
        tokens += [list(answer.outputs[0].token_ids) for answer in answers]
        uses = [use for use in device_info().processes if use.creates]
    counts = [[use.creates, use.releases, use.unmaps] for use in uses]
    print("RESULT" + json.dumps([tokens, counts]), flush=True)
"""
SCRIPT = "engine.py"
ROW = row_of(found_version("vllm"))

pytestmark = [
    pytest.mark.long,
    pytest.mark.skipif(not is_hostvmm_build(), reason="the installed kvcached is not the build on host memory"),
    pytest.mark.skipif(
        ROW is not None and float(ROW.series) >= float(BEYOND_KVCACHED.since),
        reason="kvcached alone refuses this vLLM",
    ),
    pytest.mark.timeout(900),
]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    subprocess.run([sys.executable, "-c", MODEL, str(folder)], check=True, capture_output=True, timeout=300)
    (folder / SCRIPT).write_text(ENGINE)
    return folder


def run_engine(
    model: Path, options: Mapping[str, int], settings: Mapping[str, str]
) -> subprocess.CompletedProcess[str]:
    inherited = {name: value for name, value in os.environ.items() if "KVCACHED" not in name}
    environment = inherited | {
        **ENVIRONMENT,
        **device.environment({}, 1, forks=False),
        "PYTHONPATH": str(SERVER_SIDE),
        "VLLM_HOST_IP": "127.0.0.1",
        "KVCACHED_NIXL": "0",
        "KVCACHED_IPC_NAME": f"test-{uuid.uuid4().hex[:12]}",
        "KVCACHED_HOSTVMM_DEVICE": f"test-{uuid.uuid4().hex}",
        "KVCACHED_HOSTVMM_GIB": "0.25",
    }
    command = [sys.executable, str(model / SCRIPT), str(model), json.dumps(options)]
    return subprocess.run(
        command, env={**environment, **settings}, capture_output=True, text=True, timeout=600, check=False
    )


def result(finished: subprocess.CompletedProcess[str]) -> tuple[list[list[int]], list[list[int]]]:
    lines = [line for line in finished.stdout.splitlines() if line.startswith("RESULT")]
    assert lines, finished.stdout[-4000:] + finished.stderr[-8000:]
    tokens, counts = json.loads(lines[0].removeprefix("RESULT"))
    return tokens, counts


@dataclass(frozen=True)
class Run:
    settings: Mapping[str, str]
    options: Mapping[str, int] = field(default_factory=dict)


# From 0.29 on attention on a CPU takes no layout with all layers in a block.
LOGICAL_VIEWS = ROW is not None and float(ROW.series) >= float(LOADS_BEHIND.since)
ARRANGEMENTS = ["non-contiguous"] if LOGICAL_VIEWS else ["contiguous", "non-contiguous"]


def laid_out(arrangement: str) -> dict[str, str]:
    return {"KVCACHED_CONTIGUOUS_LAYOUT": str(arrangement == "contiguous").lower()}


# Half the time to start; the engines with few pages are spawned, as vLLM does it.
FORKED = {"EXPERIMENT_FORK": "1"}
KVCACHED = {**FORKED, "ENABLE_KVCACHED": "true", **laid_out(ARRANGEMENTS[0])}
FEW_PAGES = {
    "ENABLE_KVCACHED": "true",
    "KVCACHED_MAX_CACHED_TOKENS": "0",
    "KVCACHED_MIN_RESERVED_PAGES": "1",
    "KVCACHED_MAX_RESERVED_PAGES": "1",
}
RUNS = {
    "stock": Run(FORKED),
    **{name: Run({**FEW_PAGES, **laid_out(name)}) for name in ARRANGEMENTS},
    "device too small": Run({**KVCACHED, "KVCACHED_HOSTVMM_GIB": "0.0078125"}),
    # 96 tokens, one block of them vLLM's own: less than a page of kvcached, yet enough for vLLM's own check.
    "plan too small": Run(KVCACHED, {"num_gpu_blocks_override": 3, "max_model_len": 64}),
    "host too small": Run({**KVCACHED, "KVCACHED_HOSTVMM_GIB": "1000000"}),
}


Runs = Mapping[str, "Future[subprocess.CompletedProcess[str]]"]


@pytest.fixture(scope="module")
def runs(model: Path) -> Iterator[Runs]:
    """All engines, two at a time: most of a run is a start that keeps one core busy."""
    with ThreadPoolExecutor(2) as pool:
        yield {name: pool.submit(run_engine, model, run.options, run.settings) for name, run in RUNS.items()}


@pytest.mark.parametrize("arrangement", ARRANGEMENTS)
def test_tokens_are_those_of_the_stock_engine(runs: Runs, arrangement: str) -> None:
    """Greedy float32 output is identical while pages are mapped, unmapped and mapped again under the engine."""
    stock, no_counts = result(runs["stock"].result())
    assert no_counts == [], "without ENABLE_KVCACHED no page of the emulated device may be used"
    assert len({tuple(answer) for answer in stock}) == len(stock), "the prompts must be told apart by their answers"
    tokens, counts = result(runs[arrangement].result())
    assert tokens == stock
    ((creates, releases, unmaps),) = counts
    assert releases > 0
    assert creates > releases
    assert unmaps > creates - releases


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("device too small", "an emulated device of 8.0 MiB"),
        ("plan too small", "a planned KV cache of"),
        ("host too small", "of memory available on this machine"),
    ],
)
def test_a_start_that_cannot_work_ends_with_the_reason(runs: Runs, name: str, words: str) -> None:
    """The engine stops by itself and its log says what was found, instead of waiting for ever."""
    finished = runs[name].result()
    assert finished.returncode != 0
    assert words in finished.stdout + finished.stderr
    assert "RESULT" not in finished.stdout
