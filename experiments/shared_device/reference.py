# SPDX-License-Identifier: Apache-2.0
"""The right answers: those of one stock server for each model, without kvcached and without a connector."""

from __future__ import annotations

import asyncio
import dataclasses
import hashlib
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from experiments.common.client import Answer, answers_of
from experiments.common.model import CACHE, make_model
from experiments.common.servers import Running, Server, ServerError, ServerSpec
from experiments.shared_device.arms import BLOCK_SIZE, MAX_MODEL_LEN, MODELS
from experiments.shared_device.clients import LENGTHS, MAX_TOKENS, draw_prompts
from kvcached_nixl.vllm.adapter.versions import found_version

KEPT, DRAWN = 18, 42
"""Prompts of each model, and among how many they are chosen."""
LEAST_LEAD = 0.0004
"""In nats, of each token before the second best one. Requests are batched differently in every run, which has changed
log-probabilities by at most 0.0001 in float32 (docs/measurements.md): a closer decision may be taken either way by
stock vLLM, too."""
AT_A_TIME = 6


@dataclass(frozen=True)
class Asked:
    """Prompts of a model, and the right answer to each."""

    prompts: list[list[int]]
    answers: list[list[int]]


def reference_of(logs: Path, say: Callable[[str], None]) -> dict[str, Asked]:
    """Return the answers of an earlier run with this vLLM; else start a stock server for each model, ask, stop."""
    folders = {model: make_model(shape) for model, shape in MODELS.items()}
    words = [
        *(found_version("vllm"), KEPT, DRAWN, LEAST_LEAD, LENGTHS, MAX_TOKENS, MAX_MODEL_LEN),
        *(f"{model} {folder.name}" for model, folder in folders.items()),
    ]
    known = CACHE / f"answers-{hashlib.sha256(json.dumps(words).encode()).hexdigest()[:12]}.json"
    if not known.is_file():
        found = _reference_of(folders, logs, say)
        partial = known.with_suffix(".partial")
        partial.write_text(json.dumps({model: dataclasses.asdict(one) for model, one in found.items()}))
        partial.replace(known)
    return {model: Asked(**one) for model, one in json.loads(known.read_text()).items()}


def _reference_of(folders: Mapping[str, Path], logs: Path, say: Callable[[str], None]) -> dict[str, Asked]:
    specs = [
        ServerSpec(
            name=f"reference-{model}",
            model=folder,
            dtype="float32",
            block_size=BLOCK_SIZE,
            max_model_len=MAX_MODEL_LEN,
            forks=True,
        )
        for model, folder in folders.items()
    ]
    with Running(specs, logs, say) as launched:
        say("the right answers")
        return asyncio.run(_ask(dict(zip(folders, launched.ready(), strict=True))))


async def _ask(servers: Mapping[str, Server]) -> dict[str, Asked]:
    found = {}
    for seed, (model, server) in enumerate(servers.items()):
        prompts = draw_prompts(DRAWN, seed)
        found[model] = chosen(prompts, await answers_of(server.base_url, prompts, max(MAX_TOKENS), "right", AT_A_TIME))
    return found


def chosen(prompts: list[list[int]], answers: list[Answer], count: int = KEPT) -> Asked:
    """Return ``count`` of the prompts whose answers have no close decision, with all lengths as often."""
    kept: list[int] = []
    for length in dict.fromkeys(LENGTHS):
        wanted = count * LENGTHS.count(length) // len(LENGTHS)
        clear = [
            number
            for number, prompt in enumerate(prompts)
            if len(prompt) == length and answers[number].lead >= LEAST_LEAD
        ]
        if len(clear) < wanted:
            raise ServerError(
                f"found {len(clear)} prompts of {length} tokens without a close decision in their answers; expected "
                f"{wanted}. Wrong answers could not be told from rounding. Draw more prompts."
            )
        kept += clear[:wanted]
    return Asked([prompts[one] for one in kept], [answers[one].token_ids for one in kept])
