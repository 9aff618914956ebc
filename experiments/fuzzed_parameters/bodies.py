# SPDX-License-Identifier: Apache-2.0
"""Draws requests with faults in the body or the headers, outside their ``kv_transfer_params``, from a seed."""

from __future__ import annotations

import copy
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from experiments.fuzzed_parameters.endpoints import Endpoint, Prompt
from experiments.fuzzed_parameters.sets import HOSTILE

__all__ = ["Asked", "change"]

IDS: tuple[Any, ...] = (
    "",
    "a",
    "a,b",
    "0",
    "x" * 900,
    "x" * 5000,
    "kvcached-nixl:over:1",
    "kvcached-nixl:quiet:1",
    "HB:a",
    "\x00",
    "\ud800",
    "é",
    7,
    None,
    [],
)
"""Request ids that a client may send, in addition to the ids of existing requests."""


@dataclass
class Asked:
    """One request, before it is sent.

    Attributes:
        prompts: the prompts that its choices must answer; None where the right answer is unknown.
        is_cut: whether fewer tokens may have been requested.
        changes: names of the faults that it has.
    """

    endpoint: Endpoint
    body: dict[str, Any]
    headers: dict[str, str]
    prompts: list[Prompt] | None
    is_cut: bool = False
    changes: list[str] = field(default_factory=list)


Change = Callable[[random.Random, Asked, Sequence[Any], Sequence[Prompt]], None]


def change(random_: random.Random, asked: Asked, ids: Sequence[str], prompts: Sequence[Prompt]) -> None:
    """Add one to three faults or other changes to ``asked``.

    Args:
        ids: ids of requests that the engines run or keep.
        prompts: prompts that a request may have.
    """
    for _ in range(random_.choice((1, 1, 2, 3))):
        one = random_.choice(CHANGES)
        asked.changes.append(one.__name__.removeprefix("_"))
        one(random_, asked, (*ids, *ids, *IDS), prompts)


def _field(field: str, *values: Any) -> Change:
    """Return a change that sets a field of the body to one of these values."""

    def change_field(random_: random.Random, asked: Asked, *_: Any) -> None:
        asked.body[field] = copy.deepcopy(random_.choice(values))

    change_field.__name__ = field
    return change_field


def _sampling(asked: Asked) -> dict[str, Any]:
    """Return the body's sampling parameters; none if it has none, or an earlier change has put another value there."""
    found = asked.body.get("sampling_params")
    return found if isinstance(found, dict) else {}


def _request_id(random_: random.Random, asked: Asked, ids: Sequence[Any], _: Sequence[Prompt]) -> None:
    asked.body["request_id"] = random_.choice(ids)


def _rejected(random_: random.Random, asked: Asked, ids: Sequence[Any], _: Sequence[Prompt]) -> None:
    """A request that vLLM rejects: it tells the connector that a request with the body's id has ended."""
    asked.body["request_id"] = random_.choice(ids)
    asked.body["model"] = "no such model"


def _rejected_later(random_: random.Random, asked: Asked, ids: Sequence[Any], _: Sequence[Prompt]) -> None:
    """A request whose model is valid, and which vLLM rejects later, when it processes the prompt."""
    asked.body["request_id"] = random_.choice(ids)
    limit = random_.choice([key for key in asked.body if key.startswith("max_")] or ["max_tokens"])
    asked.body[limit] = random_.choice((10**6, 0, -1))
    asked.prompts = None


def _header(random_: random.Random, asked: Asked, ids: Sequence[Any], _: Sequence[Prompt]) -> None:
    values = [one for one in ids if isinstance(one, str) and one.isascii() and one.isprintable()]
    name = random_.choice(("X-Request-Id", "X-Request-Id", "X-Session-ID", "X-Vllm-Priority", "X-data-parallel-rank"))
    asked.headers[name] = random_.choice((*values, "0", "1", "-1", "99999999999999999999"))


def _stream(random_: random.Random, asked: Asked, *_: Any) -> None:
    asked.body["stream"] = random_.choice((True, True, False, "yes", 1, None, []))
    if random_.random() < 0.5:
        asked.body["stream_options"] = random_.choice(({"include_usage": True}, {}, [], None))
    if not asked.endpoint.can_stream:
        # vLLM's endpoint for batches of chats accepts it, but answers with the last token of each only.
        asked.prompts = None


def _fewer_tokens(random_: random.Random, asked: Asked, *_: Any) -> None:
    for where in (asked.body, _sampling(asked)):
        for key in [key for key in where if key.startswith("max_")]:
            where[key] = random_.choice((1, 2, 3, "2", 2.0))
    asked.is_cut = True


def _prompt(random_: random.Random, asked: Asked, _: Sequence[Any], prompts: Sequence[Prompt]) -> None:
    """Completions: the prompt in another form, or several prompts. Other endpoints: a value that is not a prompt."""
    if asked.body.get("n", 1) != 1 or "prompt" not in asked.body:
        keys = [key for key in ("prompt", "messages", "input", "token_ids") if key in asked.body]
        asked.body[random_.choice(keys or ["prompt"])] = copy.deepcopy(
            random_.choice((*HOSTILE, [-1], [10**9], [[]], ""))
        )
        asked.prompts = None
        return
    several = [random_.choice(prompts) for _ in range(random_.choice((1, 2, 3)))]
    forms = [[one.text for one in several], [list(one.token_ids) for one in several]]
    asked.body["prompt"] = random_.choice(forms)
    asked.prompts = several


def _what_is_told(random_: random.Random, asked: Asked, *_: Any) -> None:
    """Request log-probabilities of the answer or of the prompt, or the prompt itself."""
    where = _sampling(asked) or asked.body
    where[random_.choice(("logprobs", "prompt_logprobs", "echo", "top_logprobs"))] = random_.choice((1, True, 5, -1, 0))
    if "echo" in where:
        asked.prompts = None


def _search(random_: random.Random, asked: Asked, *_: Any) -> None:
    asked.body["use_beam_search"] = True
    asked.body["n"] = random_.choice((1, 2))
    asked.prompts = None


def _parameters_of_any_type(random_: random.Random, asked: Asked, *_: Any) -> None:
    found = copy.deepcopy(random_.choice(HOSTILE))
    for place in ("kv_transfer_params", "ec_transfer_params"):
        asked.body[random_.choice(("kv_transfer_params", place))] = found
    if sampling := _sampling(asked):
        sampling["extra_args"] = random_.choice(({"kv_transfer_params": found}, found))


def _another_value(random_: random.Random, asked: Asked, *_: Any) -> None:
    asked.body[random_.choice(list(asked.body))] = copy.deepcopy(random_.choice(HOSTILE))
    asked.prompts = None


def _without_a_field(random_: random.Random, asked: Asked, *_: Any) -> None:
    del asked.body[random_.choice(list(asked.body))]
    asked.prompts = None


CHANGES: tuple[Change, ...] = (
    _request_id,
    _rejected,
    _rejected,
    _rejected_later,
    _header,
    _header,
    _field("model", "no such model", "no-such-adapter", "", None, 7, ["model"], "model"),
    _field("priority", 0, 1, -1, 2**63, -(2**70), "0", "high", None, 0.5),
    _field("n", 0, 1, 2, 3, -1, 10**9, "2", None, 1.5),
    _stream,
    _stream,
    _field("cache_salt", "", "x", "x" * 5000, 7, None, ["x"]),
    _fewer_tokens,
    _prompt,
    _what_is_told,
    _search,
    _parameters_of_any_type,
    # Extra arguments that a client may pass to the engine.
    _field(
        "vllm_xargs",
        {"kv_transfer_params": "x"},
        {"kv_transfer_params": 7, "do_remote_prefill": 1},
        {"session_id": "x" * 3000},
        {"kv_transfer_params": ["x"]},
        [],
    ),
    _another_value,
    _without_a_field,
)
