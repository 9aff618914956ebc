# SPDX-License-Identifier: Apache-2.0
"""Draws malformed ``kv_transfer_params``, and faults in the body or the headers around them, from a seed."""

from __future__ import annotations

import copy
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from experiments.fuzzed_parameters.endpoints import Endpoint, Prompt
from kvcached_nixl.wire.params import MANIFEST_KEY

HOSTILE: tuple[Any, ...] = (
    *(None, True, False, 0, 1, -1, 2**31, 2**63, 2**64, 10**9, 1e308, 0.5),
    *("", "0", "true", "x" * 5000, "a,b", "\ud800", "\x00"),
    *([], [[]], [[[[]]]], {}, {"a": {"b": {}}}, [0, 0, 0], [1, "1", None]),
)
HOSTS = ("127.0.0.1", "127.0.0.2", "::1", "", "no such host", "127.0.0.1:1", "[::1]")
"""Loopback addresses, and strings that are not addresses."""


def draw(random_: random.Random, answers: Sequence[dict[str, Any]], ports: Sequence[int]) -> tuple[Any, int, list[str]]:
    """Return malformed parameters, made from parameters that prefill has answered; ``n``; and the changes' names.

    Args:
        answers: parameters that prefill answered, also to other requests.
        ports: ports of loopback: one that no process listens on, one whose listener never answers, and prefill's.
    """
    params = copy.deepcopy(random_.choice(answers))
    changes = []
    for _ in range(random_.choice((1, 1, 1, 2, 3))):
        change = random_.choice(CHANGES)
        changes.append(change.__name__.removeprefix("_"))
        params = change(random_, params, answers, ports)
        if not isinstance(params, dict):
            break
    return params, random_.choice((1, 1, 1, 1, 2)), changes


Change = Callable[[random.Random, dict[str, Any], Sequence[dict[str, Any]], Sequence[int]], Any]


def _key(key: str, *values: Any) -> Change:
    """Return a change that sets a key to one of these values."""

    def change_key(random_: random.Random, params: dict[str, Any], *_: Any) -> Any:
        params[key] = copy.deepcopy(random_.choice(values))
        return params

    change_key.__name__ = key
    return change_key


def _drop_a_key(random_: random.Random, params: dict[str, Any], *_: Any) -> Any:
    where = _somewhere(random_, params)
    where.pop(random_.choice(list(where)), None)
    return params


def _set_a_key(random_: random.Random, params: dict[str, Any], *_: Any) -> Any:
    where = _somewhere(random_, params)
    where[random_.choice([*where, "do_remote_decode", "dcp_size", "pp_size", "remote_num_tokens"])] = copy.deepcopy(
        random_.choice(HOSTILE)
    )
    return params


def _another_requests_value(
    random_: random.Random, params: dict[str, Any], answers: Sequence[dict[str, Any]], *_: Any
) -> Any:
    other = random_.choice(answers)
    if random_.random() < 0.5 or MANIFEST_KEY not in params:
        key = random_.choice(list(other))
        params[key] = copy.deepcopy(other[key])
    elif isinstance(params[MANIFEST_KEY], dict):
        key = random_.choice(list(other[MANIFEST_KEY]))
        params[MANIFEST_KEY][key] = copy.deepcopy(other[MANIFEST_KEY][key])
    return params


def _other_blocks(random_: random.Random, params: dict[str, Any], *_: Any) -> Any:
    manifest = params.get(MANIFEST_KEY)
    groups = manifest.get("groups") if isinstance(manifest, dict) else None
    if isinstance(groups, list) and groups and isinstance(groups[0], dict):
        blocks = groups[0].get("block_ids")
        if isinstance(blocks, list) and blocks:
            place = random_.randrange(len(blocks))
            change = random_.randrange(5)
            if change == 0:
                blocks[place] = random_.randrange(-2, 5000)
            elif change == 1:
                random_.shuffle(blocks)
            elif change == 2:
                del blocks[place:]
            elif change == 3:
                blocks.append(random_.randrange(5000))
            else:
                groups.append(copy.deepcopy(groups[0]))
    return params


def _other_numbers(random_: random.Random, params: dict[str, Any], *_: Any) -> Any:
    where = _somewhere(random_, params)
    numbers = [key for key, value in where.items() if isinstance(value, (int, float)) and not isinstance(value, bool)]
    if numbers:
        where[random_.choice(numbers)] += random_.choice((-64, -32, -1, 1, 32, 64, 10**6))
    return params


def _elsewhere(random_: random.Random, params: dict[str, Any], _: Any, ports: Sequence[int]) -> Any:
    params["remote_host"], params["remote_port"] = random_.choice(HOSTS), random_.choice(ports)
    return params


def _only_the_role(random_: random.Random, params: dict[str, Any], *_: Any) -> Any:
    return {random_.choice(("do_remote_prefill", "do_remote_decode")): random_.choice((True, 1, "true", [], {}))}


def _rebuilt_field_by_field(_: random.Random, params: dict[str, Any], *__: Any) -> Any:
    """Keep vLLM's own fields only, as a router does that copies known fields one by one."""
    return {key: value for key, value in params.items() if key != MANIFEST_KEY}


def _deep(random_: random.Random, params: dict[str, Any], *_: Any) -> Any:
    deep: Any = 1
    for _ in range(random_.choice((10, 100, 400))):
        deep = [deep] if random_.random() < 0.5 else {"a": deep}
    params[random_.choice([*params, "more"])] = deep
    return params


def _prefills_role(random_: random.Random, params: dict[str, Any], *_: Any) -> Any:
    return {"do_remote_decode": True, "transfer_id": random_.choice((None, "t", 1, "\udfff", {"a": 1}))}


def _again(_: random.Random, params: dict[str, Any], *__: Any) -> Any:
    """Use parameters unchanged that were used before."""
    return params


CHANGES: tuple[Change, ...] = (
    *(_drop_a_key, _set_a_key, _set_a_key, _another_requests_value, _other_blocks, _other_blocks, _other_numbers),
    *(_elsewhere, _only_the_role, _rebuilt_field_by_field, _deep, _prefills_role, _again),
    _key("tp_size", 0, 2, 3, 4, 1024, 1025, 10**9, -1, "1"),
    _key("do_remote_decode", True, 1, "yes"),
    _key("transfer_id", "a", "a,b", "x" * 1024, "x" * 1025, "\ud800", 7, ["a"]),
)


def _somewhere(random_: random.Random, params: dict[str, Any]) -> dict[str, Any]:
    """Return the parameters themselves, or the manifest in them, or one of its groups."""
    manifest = params.get(MANIFEST_KEY)
    if not isinstance(manifest, dict) or not manifest or random_.random() < 0.4:
        return params if params else {"": None}
    groups = manifest.get("groups")
    if isinstance(groups, list) and groups and isinstance(groups[0], dict) and groups[0] and random_.random() < 0.4:
        found: dict[str, Any] = groups[0]
        return found
    return manifest


# ------------------------------------------------------------------------------------ faults in the body or the headers


IDS: tuple[Any, ...] = (
    *("", "a", "a,b", "0", "x" * 900, "x" * 5000, "kvcached-nixl:over:1", "kvcached-nixl:quiet:1", "HB:a", "\x00"),
    *("\ud800", "é", 7, None, []),
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


BodyChange = Callable[[random.Random, Asked, Sequence[Any], Sequence[Prompt]], None]


def change_body(random_: random.Random, asked: Asked, ids: Sequence[str], prompts: Sequence[Prompt]) -> None:
    """Add one to three faults or other changes to ``asked``.

    Args:
        ids: ids of requests that the engines run or keep.
        prompts: prompts that a request may have.
    """
    for _ in range(random_.choice((1, 1, 2, 3))):
        one = random_.choice(BODY_CHANGES)
        asked.changes.append(one.__name__.removeprefix("_"))
        one(random_, asked, (*ids, *ids, *IDS), prompts)


def _field(field: str, *values: Any) -> BodyChange:
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


BODY_CHANGES: tuple[BodyChange, ...] = (
    *(_request_id, _rejected, _rejected, _rejected_later, _header, _header, _stream, _stream, _fewer_tokens, _prompt),
    *(_what_is_told, _search, _parameters_of_any_type, _another_value, _without_a_field),
    _field("model", "no such model", "no-such-adapter", "", None, 7, ["model"], "model"),
    _field("priority", 0, 1, -1, 2**63, -(2**70), "0", "high", None, 0.5),
    _field("n", 0, 1, 2, 3, -1, 10**9, "2", None, 1.5),
    _field("cache_salt", "", "x", "x" * 5000, 7, None, ["x"]),
    # Extra arguments that a client may pass to the engine.
    _field(
        "vllm_xargs",
        {"kv_transfer_params": "x"},
        {"kv_transfer_params": 7, "do_remote_prefill": 1},
        {"session_id": "x" * 3000},
        {"kv_transfer_params": ["x"]},
        [],
    ),
)
