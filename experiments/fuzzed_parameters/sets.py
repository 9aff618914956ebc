# SPDX-License-Identifier: Apache-2.0
"""Draws malformed ``kv_transfer_params`` from a seed."""

from __future__ import annotations

import copy
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from kvcached_nixl.wire.params import MANIFEST_KEY

__all__ = ["Drawn", "draw"]

HOSTILE: tuple[Any, ...] = (
    None,
    True,
    False,
    0,
    1,
    -1,
    2**31,
    2**63,
    2**64,
    10**9,
    1e308,
    0.5,
    "",
    "0",
    "true",
    "x" * 5000,
    "a,b",
    "\ud800",
    "\x00",
    [],
    [[]],
    [[[[]]]],
    {},
    {"a": {"b": {}}},
    [0, 0, 0],
    [1, "1", None],
)
HOSTS = ("127.0.0.1", "127.0.0.2", "::1", "", "no such host", "127.0.0.1:1", "[::1]")
"""Loopback addresses, and strings that are not addresses."""


@dataclass(frozen=True)
class Drawn:
    """One request: its params, ``n``, and the names of the changes that were made to the params."""

    params: Any
    n: int
    change: str


def draw(random_: random.Random, answers: Sequence[dict[str, Any]], ports: Sequence[int]) -> Drawn:
    """Return malformed parameters, made from parameters that prefill has answered.

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
    return Drawn(params, random_.choice((1, 1, 1, 1, 2)), "+".join(changes))


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
    _drop_a_key,
    _set_a_key,
    _set_a_key,
    _another_requests_value,
    _other_blocks,
    _other_blocks,
    _other_numbers,
    _elsewhere,
    _key("tp_size", 0, 2, 3, 4, 1024, 1025, 10**9, -1, "1"),
    _key("do_remote_decode", True, 1, "yes"),
    _only_the_role,
    _rebuilt_field_by_field,
    _deep,
    _key("transfer_id", "a", "a,b", "x" * 1024, "x" * 1025, "\ud800", 7, ["a"]),
    _prefills_role,
    _again,
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
