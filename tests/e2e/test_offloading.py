# SPDX-License-Identifier: Apache-2.0
"""A connector that keeps KV beside NixlConnector (``MultiConnector``), on real servers, both sides and both orders.

Answers are those of a stock instance: handed over, handed over with a prompt that prefill has loaded, and loaded by
decode alone. The connectors: HostShelf (``tests/support/server_side``), which holds a finished request's blocks until
they are saved; and, since vLLM 0.28, vLLM's OffloadingConnector, which copies blocks whose requests have ended
meanwhile, between host memories.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import pytest
from support.waiting import until

from experiments.byte_equivalence.compare import LOGPROB_TOLERANCE, Difference, compare_answers
from experiments.common import model as models
from experiments.common.client import Answer, Client, answers_of, http_client, read_answer
from experiments.common.counted import PageWatch, count, hand_overs
from experiments.common.device import layout, nixl, role
from experiments.common.servers import GIVES_BACK, REPOSITORY, SERVER_SIDE, Server, ServerError, ServerSpec, running
from kvcached_nixl.vllm.adapter.versions import HASHES_AHEAD, HITS_DIVERGE, installed_has

SHELF = REPOSITORY / "tests/support/server_side"
KVCACHED = {
    **{"ENABLE_KVCACHED": "true", "KVCACHED_HOSTVMM_GIB": "2", **layout(), **GIVES_BACK},
    "PYTHONPATH": os.pathsep.join(map(str, (SERVER_SIDE, REPOSITORY, SHELF))),
}
BLOCK_SIZE = 32
LENGTHS = (100, 230, 5000)
"""The last has more blocks than the pages that are always mapped, so that memory that is kept shows."""
LONGEST = 8192
TOKENS = 8
IN_TIME_SECONDS = 30.0
Connector = Mapping[str, Any]


def prompt(length: int) -> list[int]:
    return [3 + (7 * place + place * place + length) % 500 for place in range(length)]


def host_shelf(folder: Path) -> Connector:
    extra = {"folder": str(folder)}
    return {"kv_connector": "HostShelf", "kv_connector_module_path": "host_shelf", "kv_connector_extra_config": extra}


def offloading(folder: Path) -> Connector:
    # Later than most requests end.
    extra: dict[str, Any] = {"host_blocks": 400, "delay_seconds": 0.3, "folder": str(folder)}
    spec = {"spec_name": "HostTierSpec", "spec_module_path": "host_tier"}
    return {"kv_connector": "OffloadingConnector", "kv_connector_extra_config": {**spec, **extra}}


def offloading_at_once(folder: Path) -> Connector:
    """It loads in the step that computes the rest. vLLM before 0.33 does not know this setting."""
    found = offloading(folder)
    found["kv_connector_extra_config"]["sync_load_budget_bytes"] = 1 << 30
    return found


def spec(name: str, **fields: Any) -> ServerSpec:
    model = models.make_model(models.ModelShape(max_positions=2 * LONGEST))
    sizes = {"block_size": BLOCK_SIZE, "max_model_len": LONGEST, "max_num_batched_tokens": LONGEST}
    return ServerSpec(name, model, "float32", forks=True, **sizes, **{"environment": KVCACHED, **fields})


def beside(name: str, other: Connector, mode: str, *, is_first: bool) -> ServerSpec:
    """A server with another connector beside NixlConnector."""
    children = [nixl(name, {"transfer_mode": mode}), {"kv_role": "kv_both", **other}]
    transfer = {
        "kv_connector": "MultiConnector",
        "kv_role": role(name),
        "kv_load_failure_policy": "fail",
        "kv_connector_extra_config": {
            "connectors": children[::-1] if is_first else children,
            "trusted_connectors": ["HostShelf", "HostTierSpec"],
        },
    }
    return spec(name, kv_transfer=transfer)


@pytest.fixture(scope="module")
def expected(tmp_path_factory: pytest.TempPathFactory) -> dict[int, Answer]:
    """Answers of a stock instance, by the length of the prompt."""

    with running([spec("stock", environment={})], tmp_path_factory.mktemp("stock")) as (server,):
        alone = asyncio.run(answers_of(server.base_url, [*map(prompt, LENGTHS)], TOKENS, "alone"))
    return dict(zip(LENGTHS, alone, strict=True))


async def answer_of(client: Client, length: int) -> Answer:
    return await client.answer(prompt(length), max_tokens=TOKENS, salt="one", request_id=f"alone-{length}")


@dataclass(frozen=True)
class Route:
    """A prefill and a decode server, and where each keeps KV."""

    servers: tuple[Server, Server]
    clients: tuple[Client, Client]
    folders: tuple[Path, Path]
    mode: str
    expected: Mapping[int, Answer]

    async def hand_over(self, length: int, turn: str) -> Answer:
        """As a router does: one side after the other, or, for push, both at once."""
        prefill, decode = self.clients
        name = f"{turn}-{length}"
        prefilling = prefill.complete(
            prompt(length),
            max_tokens=1,
            salt="one",
            request_id=f"{name}-prefill",
            kv_transfer_params={"do_remote_decode": True, "transfer_id": name},
        )
        if self.mode == "pull":
            params = (await prefilling)["kv_transfer_params"]
        else:
            params = {**self.servers[0].coordinates, "do_remote_prefill": True, "transfer_id": name}
        decoding = decode.complete(
            prompt(length), max_tokens=TOKENS, salt="one", request_id=f"{name}-decode", kv_transfer_params=params
        )
        if self.mode == "pull":
            return read_answer(await decoding, TOKENS)
        return read_answer((await asyncio.gather(decoding, prefilling))[0], TOKENS)

    async def differences(self, ask: Callable[[int], Awaitable[Answer]]) -> list[Difference]:
        """How the answers to all prompts differ from those of the stock instance."""
        found = []
        for length in LENGTHS:
            answer = await ask(length)
            found += compare_answers(str(length), self.expected[length], answer, LOGPROB_TOLERANCE["float32"])
        return found

    async def forget(self) -> None:
        """Clear both local prefix caches. What the other connectors keep stays."""
        for client in self.clients:
            reply = await client.http.post(f"{client.base_url}/reset_prefix_cache")
            assert reply.status_code == httpx.codes.OK, reply.text

    def loaded_tokens(self, side: int) -> int:
        return count([self.servers[side]], "vllm:external_prefix_cache_hits_total{")

    def have_been_handed_over(self, number: int) -> None:
        """Hand-overs whose bytes were moved. Decode counts them with pull, prefill with push."""
        assert hand_overs(self.servers, number) == number


def stored(folder: Path) -> bool:
    """Whether every prompt is kept."""
    num_blocks = sum(length // BLOCK_SIZE for length in LENGTHS)
    if (copied := folder / "stored").exists():
        return copied.stat().st_size == num_blocks
    return len(list(folder.rglob("*.safetensors"))) == num_blocks


def spoil(folder: Path) -> None:
    """Overwrite half of what is kept."""
    for file in folder.rglob("*.safetensors"):
        content = file.read_bytes()
        file.write_bytes(content[: len(content) // 2].ljust(len(content), b"\0"))


CASES = {
    "pull, HostShelf first": ("pull", host_shelf, True),
    "push, HostShelf second": ("push", host_shelf, False),
    "pull, OffloadingConnector first": ("pull", offloading, True),
    "push, OffloadingConnector second": ("push", offloading, False),
}
if installed_has(HASHES_AHEAD):
    CASES["pull, OffloadingConnector first, at once"] = ("pull", offloading_at_once, True)


@pytest.mark.parametrize("case", list(CASES))
def test_answers_are_right_from_either_connector(case: str, expected: dict[int, Answer], tmp_path: Path) -> None:
    """Both sides find prompts again when their prefix caches were cleared. A request that both connectors keep is freed
    once: the memory of both sides comes back."""
    mode, other, is_first = CASES[case]
    if other is offloading and not installed_has(HITS_DIVERGE):
        pytest.skip("OffloadingConnector is refused with this vLLM")
    folders = (tmp_path / "kept-by-prefill", tmp_path / "kept-by-decode")
    for folder in folders:
        folder.mkdir()
    specs = [
        beside(name, other(folders[side]), mode, is_first=is_first) for side, name in ((0, "prefill"), (1, "decode"))
    ]
    with running(specs, tmp_path) as (prefill, decode):
        watches = [PageWatch(server.identity) for server in (prefill, decode)]
        at_rest = [watch.mapped_bytes() for watch in watches]
        asyncio.run(_all_ways((prefill, decode), folders, mode, expected, is_first))
        for watch, level in zip(watches, at_rest, strict=True):
            until(lambda watch=watch, level=level: watch.mapped_bytes() == level, "memory is kept", IN_TIME_SECONDS)  # type: ignore[misc]
        for server in (prefill, decode):
            server.check_alive()


async def _all_ways(
    servers: tuple[Server, Server],
    folders: tuple[Path, Path],
    mode: str,
    expected: Mapping[int, Answer],
    is_first: bool,
) -> None:
    async with http_client(2) as http:
        clients = (Client(servers[0].base_url, http), Client(servers[1].base_url, http))
        route = Route(servers, clients, folders, mode, expected)
        assert not await route.differences(lambda length: route.hand_over(length, "computed"))
        route.have_been_handed_over(len(LENGTHS))
        for folder in folders:
            await asyncio.to_thread(until, partial(stored, folder), f"{folder} has not every prompt", IN_TIME_SECONDS)

        # Prefill loads what it hands over. Decode takes it from the first connector that has it.
        await route.forget()
        before = route.loaded_tokens(0)
        assert not await route.differences(lambda length: route.hand_over(length, "loaded"))
        assert route.loaded_tokens(0) - before >= sum(length - BLOCK_SIZE for length in LENGTHS)
        route.have_been_handed_over(len(LENGTHS) * (1 if is_first else 2))

        # Decode loads without a hand-over.
        await route.forget()
        before = route.loaded_tokens(1)
        assert not await route.differences(lambda length: answer_of(clients[1], length))
        assert route.loaded_tokens(1) - before >= sum(length - BLOCK_SIZE for length in LENGTHS)

        if (folders[0] / "loaded").exists():
            # On prefill in the second turn, on decode in the third, and in the second if it comes first.
            assert all((folder / "loaded").stat().st_size >= (folder / "stored").stat().st_size for folder in folders)
            return
        # Planted: the kept bytes are others. That shows that they were used.
        for folder in folders:
            spoil(folder)
        await route.forget()
        assert len({one.prompt for one in await route.differences(lambda length: answer_of(clients[1], length))}) == 3
        assert await route.differences(lambda length: route.hand_over(length, "spoiled"))


def test_an_offloading_connector_that_kvcached_does_not_allow_is_refused(tmp_path: Path) -> None:
    """The server ends before it listens, and its log says what to do."""
    on_a_gpu = {"kv_connector": "OffloadingConnector", "kv_connector_extra_config": {"cpu_bytes_to_use": 1 << 30}}
    refused = beside("prefill", on_a_gpu, "pull", is_first=False)
    with pytest.raises(ServerError, match="ended with status"), running([refused], tmp_path):
        pass
    log = (tmp_path / "prefill.log").read_text(errors="replace")
    assert "OffloadingConnector" in log and "Remove OffloadingConnector" in log
