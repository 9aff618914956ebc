# SPDX-License-Identifier: Apache-2.0
"""KV is identified by the content of what computed it: weights and adapters, wherever they lie and whatever their name.

Weights may change while a server runs. Pauses revoke what is kept, on both sides, in any order.
"""

from __future__ import annotations

import asyncio
import json
import shutil
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
from safetensors.torch import load_file, save_file
from support.feature_models import adapter, spec

from experiments.common import model as models
from experiments.common.client import Answer, AnswerError, Client, http_client, read_answer
from experiments.common.servers import Server, running

PROMPT = [3 + place % 500 for place in range(100)]
TOKENS = 8
PAUSED_SECONDS = 5.0
"""A pause returns within a second or two; this machine may have others on it."""


@dataclass
class Offered:
    """Prefill's answer, and the salt that decode has to ask with."""

    params: dict[str, Any]
    salt: str


@dataclass
class Asking:
    """A router and an operator, of real servers. ``turn``: no two requests share a prefix cache."""

    prefill: Client
    decode: Client
    turn: int = 0

    async def alone(self, client: Client) -> Answer:
        self.turn += 1
        return await client.answer(
            PROMPT, max_tokens=TOKENS, salt=f"alone-{self.turn}", request_id=f"alone-{self.turn}"
        )

    async def offered(self, salt: str = "") -> Offered:
        """``salt``: of an earlier one, to begin with what prefill has cached."""
        self.turn += 1
        name = f"offered-{self.turn}"
        params = {"do_remote_decode": True, "do_remote_prefill": False}
        answer = await self.prefill.complete(
            PROMPT, max_tokens=1, salt=salt or name, request_id=name, kv_transfer_params=params
        )
        # None if nothing is offered.
        return Offered(answer["kv_transfer_params"], salt or name)

    async def fetched(self, offered: Offered | None = None, decode: Client | None = None) -> list[int]:
        offered = offered or await self.offered()
        self.turn += 1
        answer = await (decode or self.decode).complete(
            PROMPT,
            max_tokens=TOKENS,
            salt=offered.salt,
            request_id=f"fetched-{self.turn}",
            kv_transfer_params=offered.params,
        )
        return read_answer(answer, TOKENS).token_ids

    async def refused(self, offered: Offered | None = None, decode: Client | None = None) -> None:
        with pytest.raises(AnswerError, match="answered 5"):
            await self.fetched(offered, decode)

    async def change(self, client: Client, seed: str) -> None:
        await self.call(client, "/collective_rpc", {"method": "kv_probe_other_weights", "args": [seed]})

    async def plain_norms(self, client: Client, change: float) -> None:
        await self.call(client, "/collective_rpc", {"method": "kv_probe_plain_norms", "args": [change]})

    async def pause(self, client: Client, **query: str) -> float:
        begun = time.monotonic()
        await self.call(client, "/pause", **query)
        return time.monotonic() - begun

    async def differs(self, other: Client) -> list[int]:
        """KV is fetched where weights are the same, and refused by ``other``. Returns what prefill answers alone."""
        expected = (await self.alone(self.prefill)).token_ids
        assert expected != (await self.alone(other)).token_ids, "they must differ for this to show anything"
        assert await self.fetched() == expected
        await self.refused(decode=other)
        return expected

    async def resume(self, client: Client) -> None:
        await self.call(client, "/resume")

    async def call(self, client: Client, path: str, body: Any = None, **query: str) -> None:
        reply = await client.http.post(client.base_url + path, json=body, params=query)
        assert reply.status_code == httpx.codes.OK, f"{path}: {reply.status_code} {reply.text[:500]}"


@asynccontextmanager
async def asking_of(*servers: Server) -> AsyncIterator[tuple[Asking, list[Client]]]:
    """Of prefill and decode; and clients of the others."""
    async with http_client(16) as http:
        prefill, decode, *others = (Client(one.base_url, http) for one in servers)
        yield Asking(prefill, decode), others


@pytest.mark.parametrize("mode", ["pull", "push"])
def test_weights_are_known_by_their_content(mode: str, tmp_path: Path) -> None:
    """Findings A1 and A3: one name and other weights, other names and the same, weights that change meanwhile."""
    first, other = models.make_model(), tmp_path / "fine-tuned"
    # On a CPU vLLM keeps linear layers where they cannot be read: only the files tell these two apart.
    shutil.copytree(first, other)
    weights = load_file(other / "model.safetensors")
    for name in [name for name in weights if name.endswith("k_proj.weight")]:
        weights[name] = weights[name] * -1
    save_file(weights, other / "model.safetensors", {"format": "pt"})
    moved = tmp_path / "somewhere" / "else"
    shutil.copytree(first, moved)
    link = tmp_path / "model"
    link.symlink_to(first)
    # ``ngram`` drafts have no model, so they are decode's own matter (finding B5).
    drafts = '{"method":"ngram","num_speculative_tokens":2,"prompt_lookup_max":3,"prompt_lookup_min":1}'
    same = spec("decode", moved, mode, "--speculative-config", drafts)
    with running([spec("prefill", link, mode), same], tmp_path) as (prefill, decode):
        link.unlink()
        link.symlink_to(other)
        with running([spec("other", link, mode)], tmp_path) as (stranger,):
            asyncio.run(_weights(prefill, decode, stranger))
            log = stranger.log.read_text(errors="replace")
        for one in (prefill, decode):
            one.check_alive()
    assert "computes with other weights" in log and "Load the same on both sides" in log


async def _weights(prefill: Server, decode: Server, stranger: Server) -> None:
    async with asking_of(prefill, decode, stranger) as (asking, (other,)):
        expected = await asking.differs(other)
        # A rolling update: what was kept is used by nobody, one side is older, then both are the same again.
        kept = await asking.offered()
        await asking.change(asking.prefill, "7")
        await asking.refused(kept)
        await asking.refused()
        # It would begin with what the old weights have left in prefill's prefix cache.
        kept = await asking.offered(kept.salt)
        await asking.change(asking.decode, "7")
        updated = (await asking.alone(asking.decode)).token_ids
        assert updated != expected
        assert await asking.fetched(kept) == updated, "it was computed with the weights that decode has now"
        assert await asking.fetched() == updated
        await asking.change(asking.decode, "8")
        await asking.refused()
        # What changes nothing revokes nothing.
        kept = await asking.offered()
        await asking.call(asking.prefill, "/collective_rpc", {"method": "kv_probe_geometry"})
        await asking.call(asking.decode, "/collective_rpc", {"method": "kv_probe_geometry"})
        await asking.change(asking.prefill, "8")
        await asking.refused(kept)
        assert await asking.fetched() == (await asking.alone(asking.prefill)).token_ids
        # A weight that a worker extension keeps where no list of parameters has it, and then changes.
        for client in (asking.prefill, asking.decode):
            await asking.plain_norms(client, 0.0)
        assert await asking.fetched() == (await asking.alone(asking.decode)).token_ids
        kept = await asking.offered()
        await asking.plain_norms(asking.prefill, 0.5)
        await asking.refused(kept)
        await asking.refused()
        await asking.plain_norms(asking.decode, 0.5)
        assert await asking.fetched() == (await asking.alone(asking.decode)).token_ids


KV_SCHEME = {"num_bits": 8, "type": "float", "strategy": "tensor", "symmetric": True, "dynamic": False}


def with_scales(model: Path, folder: Path, scale: float) -> Path:
    """A copy of a model with the scales of an fp8 KV cache in its files."""
    shutil.copytree(model, folder)
    weights = load_file(folder / "model.safetensors")
    for layer in range(models.GQA.layers):
        for name in ("k_scale", "v_scale"):
            weights[f"model.layers.{layer}.self_attn.{name}"] = torch.tensor([scale])
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"] = {
        "quant_method": "compressed-tensors",
        "format": "float-quantized",
        "config_groups": {},
        "kv_cache_scheme": KV_SCHEME,
    }
    (folder / "config.json").write_text(json.dumps(config))
    return folder


@pytest.mark.parametrize("mode", ["pull", "push"])
def test_scales_of_an_fp8_cache_are_weights(mode: str, tmp_path: Path) -> None:
    """The same weights with other scales are other weights: bytes of their KV stand for other numbers."""

    async def scales(*servers: Server) -> None:
        async with asking_of(*servers) as (asking, (other,)):
            await asking.differs(other)

    first, other = (with_scales(models.make_model(), tmp_path / str(scale), scale) for scale in (0.25, 0.01))
    of = [("prefill", first), ("decode", first), ("other", other)]
    with running([spec(name, model, mode, "--kv-cache-dtype", "fp8") for name, model in of], tmp_path) as servers:
        asyncio.run(scales(*servers))
        log = servers[2].log.read_text(errors="replace")
    assert "computes with other weights" in log and "scale" in log


PAUSES: list[dict[str, str]] = [
    {"mode": "keep", "clear_cache": "false"},
    {"mode": "keep", "clear_cache": "true"},
    {"mode": "abort", "clear_cache": "true"},
    {"mode": "wait", "clear_cache": "true"},
]


@pytest.fixture(params=["pull", "push"])
def pair(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[list[Server]]:
    model = models.make_model()
    with running([spec(name, model, request.param) for name in ("prefill", "decode")], tmp_path) as servers:
        yield servers


def test_pauses_return_at_once_whatever_is_kept_or_queued(pair: list[Server]) -> None:
    """Finding B2: decode paused with what it has queued, prefill with what it keeps."""
    asyncio.run(_pauses(*pair))
    for one in pair:
        one.check_alive()


async def _pauses(prefill: Server, decode: Server) -> None:
    async with asking_of(prefill, decode) as (asking, _):
        expected = (await asking.alone(asking.prefill)).token_ids
        assert await asking.fetched() == expected
        for query in PAUSES:
            kept = [await asking.offered() for _ in range(3)]
            assert await asking.pause(asking.prefill, **query) < PAUSED_SECONDS, query
            assert await asking.pause(asking.decode, **query) < PAUSED_SECONDS, query
            await asking.resume(asking.decode)
            await asking.refused(kept[0])
            await asking.resume(asking.prefill)
            assert await asking.fetched() == expected, query
        # Decode first, with hand-overs in its queue, which its workers renew on.
        kept = [await asking.offered() for _ in range(3)]
        await asking.pause(asking.decode, mode="keep", clear_cache="false")
        queued = [asyncio.create_task(asking.fetched(one)) for one in kept]
        await asyncio.sleep(1.0)
        assert await asking.pause(asking.prefill, mode="keep", clear_cache="true") < PAUSED_SECONDS
        await asking.resume(asking.decode)
        for found in await asyncio.gather(*queued, return_exceptions=True):
            assert isinstance(found, AnswerError), found
        await asking.resume(asking.prefill)
        # A reset with running requests, on both sides, while something is kept and fetched.
        kept = [await asking.offered() for _ in range(3)]
        fetching = asyncio.create_task(asking.fetched(kept[0]))
        for client in (asking.prefill, asking.decode):
            begun = time.monotonic()
            await asking.call(client, "/reset_prefix_cache", reset_running_requests="true")
            assert time.monotonic() - begun < PAUSED_SECONDS
        outcome = (await asyncio.gather(fetching, return_exceptions=True))[0]
        assert isinstance(outcome, AnswerError) or outcome == expected
        assert await asking.fetched() == expected


@pytest.mark.parametrize("mode", ["pull", "push"])
def test_adapters_are_known_by_their_content(mode: str, tmp_path: Path) -> None:
    """Finding A2: one name and other adapters, other names and the same, one that is loaded again under its name."""
    model = models.make_model()
    folders = [adapter(tmp_path / f"adapter-{seed}", seed) for seed in (1, 2)]
    copied = tmp_path / "copied"
    shutil.copytree(folders[0], copied)
    arguments = ("--enable-lora", "--max-loras", "4", "--max-lora-rank", "8")
    allowed = {"VLLM_ALLOW_RUNTIME_LORA_UPDATING": "true"}
    specs = [spec(name, model, mode, *arguments, **allowed) for name in ("prefill", "decode")]
    with running(specs, tmp_path) as (prefill, decode):
        asyncio.run(_adapters(prefill, decode, *folders, copied=copied))  # type: ignore[misc]
        for one in (prefill, decode):
            one.check_alive()


async def _adapters(prefill: Server, decode: Server, first: Path, second: Path, copied: Path) -> None:
    async with asking_of(prefill, decode) as (asking, _):
        http = asking.prefill.http

        async def load(server: Server, name: str, folder: Path, load_inplace: bool = False) -> Client:
            client = Client(server.base_url, http, name)
            body = {"lora_name": name, "lora_path": str(folder), "load_inplace": load_inplace}
            await asking.call(client, "/v1/load_lora_adapter", body)
            return client

        base = (await asking.alone(asking.prefill)).token_ids
        asking.prefill = await load(prefill, "a", first)
        expected = (await asking.alone(asking.prefill)).token_ids
        assert expected != base, "the adapter must change something for this to show anything"
        # Of the model alone, and of another adapter that has the same name.
        await asking.refused()
        other = await load(decode, "a", second)
        assert expected != (await asking.alone(other)).token_ids
        await asking.refused(decode=other)
        same = await load(decode, "another-name", copied)
        assert await asking.fetched(decode=same) == expected, "the same adapter under another name"
        # Prefill's is replaced: what it has cached under that name was computed by its predecessor.
        kept = await asking.offered()
        asking.prefill = await load(prefill, "a", second, load_inplace=True)
        updated = (await asking.alone(asking.prefill)).token_ids
        assert updated != expected
        again = await asking.offered(kept.salt)
        await asking.refused(again, decode=same)
        assert await asking.fetched(decode=other) == updated
        # Its files are replaced after it was loaded and before anybody has asked: they are not what computes.
        late = copied.parent / "late"
        shutil.copytree(first, late)
        asking.prefill = await load(prefill, "late", late)
        shutil.copytree(second, late, dirs_exist_ok=True)
        assert await asking.fetched(decode=other) == updated, "decode computes it with its own"
        asking.prefill = Client(prefill.base_url, http, "a")
        await asking.call(asking.prefill, "/collective_rpc", {"method": "list_loras"})
        assert await asking.fetched(decode=other) == updated
        # A call of collective_rpc on adapters does not say which adapter it changes, so all are suspect.
        await asking.call(asking.prefill, "/collective_rpc", {"method": "remove_lora", "args": [99]})
        assert (await asking.offered()).params is None
        asking.prefill = await load(prefill, "a", second, load_inplace=True)
        assert (await asking.offered()).params is not None
        assert await asking.fetched(decode=other) == updated
