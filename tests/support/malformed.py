# SPDX-License-Identifier: Apache-2.0
"""Draws malformed ``kv_transfer_params``, and faults in the body or the headers around them."""

from __future__ import annotations

import copy
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from kvcached_nixl.wire.params import MANIFEST_KEY
from support.endpoints import Endpoint, Prompt

HOSTILE: tuple[Any, ...] = (
    *(None, True, False, 0, 1, -1, 2**31, 2**63, 2**64, 10**9, 1e308, 0.5),
    *("", "0", "true", "x" * 5000, "a,b", "\ud800", "\x00"),
    *([], [[]], [[[[]]]], {}, {"a": {"b": {}}}, [0, 0, 0], [1, "1", None]),
)
HOSTS = ("127.0.0.1", "127.0.0.2", "::1", "", "no such host", "127.0.0.1:1", "[::1]")
IDS: tuple[Any, ...] = ("", "a", "a,b", "0", "x" * 900, "x" * 5000, "HB:a", "\x00", "\ud800", "é", 7, None, [])
"""Request ids that a client may send, beside those of existing requests."""


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


@dataclass
class Source:
    """What faults are drawn from: parameters that prefill answered, also to other requests; ports of loopback, where no
    process listens, or a listener never answers, or prefill's; ids of requests; prompts."""

    random: random.Random
    answers: Sequence[dict[str, Any]]
    ports: Sequence[int]
    ids: Sequence[Any]
    prompts: Sequence[Prompt]

    def one_of(self, *values: Any) -> Any:
        return copy.deepcopy(self.random.choice(values))

    def params(self) -> tuple[Any, list[str]]:
        """Return malformed parameters, and the names of their one to three faults."""
        params, names = self.one_of(*self.answers), []
        for _ in range(self.one_of(1, 1, 1, 2, 3)):
            change = self.random.choice(CHANGES)
            names.append(change.__name__)
            params = change(self, params)
            if not isinstance(params, dict):
                break
        return params, names

    def change_body(self, asked: Asked) -> None:
        """Add one to three faults or other changes to ``asked``."""
        for _ in range(self.one_of(1, 1, 2, 3)):
            change = self.random.choice(BODY_CHANGES)
            asked.changes.append(change.__name__)
            change(self, asked)

    def somewhere(self, params: dict[str, Any]) -> dict[str, Any]:
        """Return the parameters themselves, or the manifest in them, or its first group."""
        manifest = params.get(MANIFEST_KEY)
        places = [params or {"": None}, manifest, manifest, _group_of(params)]
        return self.random.choice([one for one in places if isinstance(one, dict) and one])


def _group_of(params: dict[str, Any]) -> Any:
    manifest = params.get(MANIFEST_KEY)
    groups = manifest.get("groups") if isinstance(manifest, dict) else None
    return groups[0] if isinstance(groups, list) and groups else None


# ----------------------------------------------------------------------------------------------- faults of parameters


def _drop_a_key(source: Source, params: dict[str, Any]) -> Any:
    where = source.somewhere(params)
    where.pop(source.one_of(*where), None)
    return params


def _set_a_key(source: Source, params: dict[str, Any]) -> Any:
    where = source.somewhere(params)
    key = source.one_of(*where, "do_remote_decode", "dcp_size", "pp_size", "remote_num_tokens")
    where[key] = source.one_of(*HOSTILE)
    return params


def _another_requests_value(source: Source, params: dict[str, Any]) -> Any:
    other, where = source.random.choice(source.answers), params
    if source.random.random() < 0.5 and isinstance(params.get(MANIFEST_KEY), dict):
        other, where = other[MANIFEST_KEY], params[MANIFEST_KEY]
    key = source.one_of(*other)
    where[key] = copy.deepcopy(other[key])
    return params


def _other_blocks(source: Source, params: dict[str, Any]) -> Any:
    group = _group_of(params)
    blocks = group.get("block_ids") if isinstance(group, dict) else None
    if isinstance(blocks, list) and blocks:
        place = source.random.randrange(len(blocks))
        group["block_ids"] = source.one_of(
            [*blocks[:place], source.random.randrange(-2, 5000), *blocks[place + 1 :]],
            source.random.sample(blocks, len(blocks)),
            blocks[:place],
            [*blocks, source.random.randrange(5000)],
        )
        if source.random.random() < 0.2:
            params[MANIFEST_KEY]["groups"].append(copy.deepcopy(group))
    return params


def _other_numbers(source: Source, params: dict[str, Any]) -> Any:
    where = source.somewhere(params)
    numbers = [key for key, value in where.items() if type(value) in (int, float)]
    if numbers:
        where[source.one_of(*numbers)] += source.one_of(-64, -32, -1, 1, 32, 64, 10**6)
    return params


def _elsewhere(source: Source, params: dict[str, Any]) -> Any:
    return {**params, "remote_host": source.one_of(*HOSTS), "remote_port": source.one_of(*source.ports)}


def _only_a_role(source: Source, params: dict[str, Any]) -> Any:
    if source.random.random() < 0.5:
        return {"do_remote_decode": True, "transfer_id": source.one_of(None, "t", 1, "\udfff", {"a": 1})}
    return {source.one_of("do_remote_prefill", "do_remote_decode"): source.one_of(True, 1, "true", [], {})}


def _rebuilt_field_by_field(_: Source, params: dict[str, Any]) -> Any:
    """Keep vLLM's own fields only, as a router does that copies known fields one by one."""
    return {key: value for key, value in params.items() if key != MANIFEST_KEY}


def _deep(source: Source, params: dict[str, Any]) -> Any:
    deep: Any = 1
    for _ in range(source.one_of(10, 100, 400)):
        deep = source.random.choice([[deep], {"a": deep}])
    return {**params, source.one_of(*params, "more"): deep}


def _again(_: Source, params: dict[str, Any]) -> Any:
    """Use parameters unchanged that were used before."""
    return params


def _sets(key: str, *values: Any) -> Callable[[Source, Any], Any]:
    """Return a change that sets a key of the parameters, or a field of the body, to one of these values."""

    def change(source: Source, changed: Any) -> Any:
        (changed.body if isinstance(changed, Asked) else changed)[key] = source.one_of(*values)
        return changed

    change.__name__ = key
    return change


CHANGES: tuple[Callable[[Source, dict[str, Any]], Any], ...] = (
    *(_drop_a_key, _set_a_key, _set_a_key, _another_requests_value, _other_blocks, _other_blocks, _other_numbers),
    *(_elsewhere, _only_a_role, _only_a_role, _rebuilt_field_by_field, _deep, _again),
    _sets("tp_size", 0, 2, 3, 4, 1024, 1025, 10**9, -1, "1"),
    _sets("do_remote_decode", True, 1, "yes"),
    _sets("transfer_id", "a", "a,b", "x" * 1024, "x" * 1025, "\ud800", 7, ["a"]),
)


# ------------------------------------------------------------------------------------ faults in the body or the headers


def _sampling(asked: Asked) -> dict[str, Any]:
    """Return the body's sampling parameters; none if it has none, or an earlier change has put another value there."""
    found = asked.body.get("sampling_params")
    return found if isinstance(found, dict) else {}


def _rejected(source: Source, asked: Asked) -> None:
    """Another id; or a request that vLLM rejects: it tells the connector that one with the body's id has ended."""
    asked.body |= {"request_id": source.one_of(*source.ids), "model": source.one_of("model", *2 * ["no such model"])}


def _rejected_later(source: Source, asked: Asked) -> None:
    """A request whose model is valid, and which vLLM rejects later, when it processes the prompt."""
    limit = source.one_of(*[key for key in asked.body if key.startswith("max_")] or ["max_tokens"])
    asked.body |= {"request_id": source.one_of(*source.ids), limit: source.one_of(10**6, 0, -1)}
    asked.prompts = None


def _header(source: Source, asked: Asked) -> None:
    values = [one for one in source.ids if isinstance(one, str) and one.isascii() and one.isprintable()]
    name = source.one_of("X-Request-Id", "X-Request-Id", "X-Session-ID", "X-Vllm-Priority", "X-data-parallel-rank")
    asked.headers[name] = source.one_of(*values, "0", "1", "-1", "99999999999999999999")


def _stream(source: Source, asked: Asked) -> None:
    asked.body["stream"] = source.one_of(True, True, False, "yes", 1, None, [])
    if source.random.random() < 0.5:
        asked.body["stream_options"] = source.one_of({"include_usage": True}, {}, [], None)
    if not asked.endpoint.can_stream:
        # vLLM's endpoint for batches of chats accepts it, but answers with the last token of each only.
        asked.prompts = None


def _fewer_tokens(source: Source, asked: Asked) -> None:
    for where in (asked.body, _sampling(asked)):
        where |= {key: source.one_of(1, 2, 3, "2", 2.0) for key in where if key.startswith("max_")}
    asked.is_cut = True


def _prompt(source: Source, asked: Asked) -> None:
    """Completions: the prompt in another form, or several prompts. Other endpoints: a value that is not a prompt."""
    if asked.body.get("n", 1) == 1 and "prompt" in asked.body:
        several = source.random.choices(source.prompts, k=source.one_of(1, 2, 3))
        asked.body["prompt"] = source.one_of([one.text for one in several], [list(one.token_ids) for one in several])
        asked.prompts = several
        return
    keys = [key for key in ("prompt", "messages", "input", "token_ids") if key in asked.body]
    asked.body[source.one_of(*keys or ["prompt"])] = source.one_of(*HOSTILE, [-1], [10**9], [[]], "")
    asked.prompts = None


def _what_is_told(source: Source, asked: Asked) -> None:
    """Request log-probabilities of the answer or of the prompt, or the prompt itself, or beam search."""
    where, keys = _sampling(asked) or asked.body, ("logprobs", "prompt_logprobs", "echo", "top_logprobs")
    where[source.one_of(*keys, "use_beam_search")] = source.one_of(1, True, 5, -1, 0)
    if where.keys() & {"echo", "use_beam_search"}:
        asked.prompts = None


def _parameters_of_any_type(source: Source, asked: Asked) -> None:
    found = source.one_of(*HOSTILE)
    asked.body[source.one_of("kv_transfer_params", "kv_transfer_params", "ec_transfer_params")] = found
    if sampling := _sampling(asked):
        sampling["extra_args"] = source.one_of({"kv_transfer_params": found}, found)


def _another_value(source: Source, asked: Asked) -> None:
    asked.body[source.one_of(*asked.body)] = source.one_of(*HOSTILE)
    asked.prompts = None


def _without_a_field(source: Source, asked: Asked) -> None:
    del asked.body[source.one_of(*asked.body)]
    asked.prompts = None


BODY_CHANGES: tuple[Callable[[Source, Asked], None], ...] = (
    *(_rejected, _rejected, _rejected, _rejected_later, _header, _header, _stream, _stream, _fewer_tokens, _prompt),
    *(_what_is_told, _parameters_of_any_type, _another_value, _without_a_field),
    _sets("model", "no such model", "no-such-adapter", "", None, 7, ["model"], "model"),
    _sets("priority", 0, 1, -1, 2**63, -(2**70), "0", "high", None, 0.5),
    _sets("n", 0, 1, 2, 3, -1, 10**9, "2", None, 1.5),
    _sets("cache_salt", "", "x", "x" * 5000, 7, None, ["x"]),
    # Extra arguments that a client may pass to the engine.
    _sets("vllm_xargs", *({"kv_transfer_params": one} for one in ("x", 7, ["x"])), {"session_id": "x" * 3000}, []),
)
