# SPDX-License-Identifier: Apache-2.0
"""Images, and prompts of embeddings, that real decode servers ask prefill for, beside one stock instance.

The model has positions of three dimensions, which decode has to work out for a prompt that it does not compute. What
differs between two images is seen by what was computed from them alone: their prompts have the same token ids.
"""

from __future__ import annotations

import asyncio
import base64
import dataclasses
import io
import random
import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib.metadata import version
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
from packaging.version import Version
from PIL import Image
from support import feature_asks as asks
from support.feature_asks import Answer, Ask
from support.feature_models import IMAGE_SIZE, SHAPE, chat_model, spec, vision_model

from experiments.common.counted import count, hand_overs
from experiments.common.device import with_extra
from experiments.common.families import stand_ins
from experiments.common.servers import Asking, Server, running
from kvcached_nixl.wire.question import ASKED_PATH

has_images = pytest.mark.skipif(
    Version(version("vllm")) < Version("0.28"),
    reason="vLLM 0.28 is the first that takes this model's images with its transformers",
)
modes = pytest.mark.parametrize("mode", ["pull", "push"])

TEMPLATE = "{% for m in messages %}{{ m.content }} {% endfor %}"
# Nothing has to be cut or made larger: that would need torchvision.
SERVING = ("--chat-template", TEMPLATE, "--limit-mm-per-prompt", '{"image": 2, "video": 0}')
AT_ONCE = 4
OFFERS: dict[str, Any] = {
    "stream": False,
    "max_completion_tokens": 1,
    "kv_transfer_params": {"do_remote_decode": True, "do_remote_prefill": False},
}
"""What prefill is asked in addition."""


def image(seed: int) -> dict[str, Any]:
    pixels = random.Random(seed).randbytes(3 * IMAGE_SIZE**2)
    written = io.BytesIO()
    Image.frombytes("RGB", (IMAGE_SIZE, IMAGE_SIZE), pixels).save(written, "PNG")
    data = base64.b64encode(written.getvalue()).decode()
    return {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{data}"}}


def ask(name: str, *seeds: int, number: int = 1, **more: Any) -> Ask:
    # So many that a block of text is left beside the image: decode computes less than a block itself.
    text = {"type": "text", "text": asks.messages(number)[0]["content"] + "." * 14}
    return Ask(
        name,
        {
            "model": "model",
            "messages": [{"role": "user", "content": [text, *map(image, seeds)]}],
            "temperature": 0,
            "max_completion_tokens": asks.TOKENS,
            "return_token_ids": True,
            **({} if more.get("stream") else {"logprobs": True, "top_logprobs": 3}),
            **more,
        },
    )


ASKS = [
    ask("no image"),
    ask("one image", 1),
    ask("another image", 2),
    ask("an image and another", 1, 2),
    ask("the same in the other order", 2, 1),
    ask("an image twice", 1, 1),
    ask("an image that both know, beside other words", 1, number=2),
    ask("one image, streamed", 3, stream=True),
    ask("another image, streamed", 4, stream=True),
]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return vision_model(tmp_path_factory.mktemp("models") / "vision")


@pytest.fixture(scope="module")
def expected(model: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Answer]:
    with running([spec("alone", model, None, *SERVING, **stand_ins())], tmp_path_factory.mktemp("alone")) as (alone,):
        return asyncio.run(asks.answers(alone.base_url, ASKS, AT_ONCE))


@has_images
def test_what_is_compared_tells_images_apart(expected: dict[str, Answer]) -> None:
    found = [expected[one.name] for one in ASKS]
    assert len({asks.words(one) for one in found}) == len(found)
    one, other = found[1:3]
    assert one["prompt_token_ids"] == other["prompt_token_ids"] and one["prompt_tokens"] == other["prompt_tokens"]


@contextmanager
def asked(mode: str, folders: Sequence[Path], logs: Path, *arguments: str) -> Iterator[tuple[Server, Server]]:
    """A prefill server, and a decode server that computes nothing that it can ask for."""
    prefill, decode = (
        spec(name, folder, mode, *arguments, **stand_ins())
        for name, folder in zip(("prefill", "decode"), folders, strict=True)
    )
    assert decode.kv_transfer is not None
    extra = with_extra(decode.kv_transfer, {"prefill_required": True, "accept_kv_transfer_params": True})
    with Asking([prefill, dataclasses.replace(decode, kv_transfer=extra)], logs) as launched:
        servers = launched.ready()
        yield servers[0], servers[1]
        for one in servers:
            one.check_alive()


@has_images
@modes
def test_an_image_is_answered_as_by_one_instance(
    mode: str, model: Path, expected: dict[str, Answer], tmp_path: Path
) -> None:
    """Decode loads its model from another folder: what identifies an image must not name it."""
    elsewhere = tmp_path / "elsewhere"
    shutil.copytree(model, elsewhere)
    with asked(mode, (model, elsewhere), tmp_path, *SERVING) as (prefill, decode):
        asks.check(asyncio.run(asks.answers(decode.base_url, ASKS, AT_ONCE)), expected)
        assert hand_overs([prefill, decode], len(ASKS)) == len(ASKS)
        computed = count([prefill], "vllm:prompt_tokens_total")
        assert computed == sum(len(one["prompt_token_ids"]) for one in expected.values()), (
            "prefill has computed all of them"
        )
        # Both sides have every image in their caches now, and the prompts.
        asks.check(asyncio.run(asks.answers(decode.base_url, ASKS, AT_ONCE)), expected)
        # One image beside words that nobody has seen, asked for all at once.
        many = [ask(f"{one} of many", 1 + one % 2, number=10 + one) for one in range(12)]
        found = asyncio.run(asks.answers(decode.base_url, many, len(many)))
        asks.check(found, asyncio.run(asks.answers(prefill.base_url, many, AT_ONCE)))
        # A client that talks to prefill: its image is the one that decode has asked for.
        asks.check(asyncio.run(asks.answers(prefill.base_url, ASKS, AT_ONCE)), expected)
        if mode == "pull":
            asyncio.run(_the_kv_of_another_image_is_refused([prefill, decode]))
            asyncio.run(_what_is_no_prompt_costs_nobody_anything(prefill))


EMBEDDINGS = 70


def embeddings(seed: int) -> str:
    drawn = torch.randn((EMBEDDINGS, SHAPE.hidden), generator=torch.Generator().manual_seed(seed))
    written = io.BytesIO()
    torch.save(drawn, written)
    return base64.b64encode(written.getvalue()).decode()


@modes
def test_embeddings_are_answered_as_by_one_instance(mode: str, tmp_path: Path) -> None:
    model = chat_model(tmp_path / "chat")
    serving = ("--enable-prompt-embeds",)
    bodies = [
        {"model": "model", "temperature": 0, "prompt_embeds": embeddings(seed), "return_token_ids": True}
        for seed in (1, 2, 1, 3)
    ]
    some = [Ask(f"embeddings {place}", {**body, "max_tokens": asks.TOKENS}) for place, body in enumerate(bodies)]
    with running([spec("alone", model, None, *serving, **stand_ins())], tmp_path) as (alone,):
        expected = asyncio.run(asks.answers(alone.base_url, some, AT_ONCE))
    assert len({asks.words(expected[one.name]) for one in some}) == len(some) - 1
    with asked(mode, (model, model), tmp_path, *serving) as (prefill, decode):
        asks.check(asyncio.run(asks.answers(decode.base_url, some, AT_ONCE)), expected)
        # Equal ones are asked for once.
        assert hand_overs([prefill, decode], 3) == 3
        assert count([prefill], "vllm:prompt_tokens_total") == 3 * EMBEDDINGS


async def _what_is_no_prompt_costs_nobody_anything(prefill: Server) -> None:
    async with httpx.AsyncClient(timeout=asks.STEP_SECONDS, trust_env=False) as http:
        for body in (b"", b"\x80", random.Random(1).randbytes(3000)):
            reply = await http.post(f"{prefill.base_url}/{ASKED_PATH}", content=body)
            assert reply.status_code == httpx.codes.BAD_REQUEST and "kvcached_nixl" in reply.text, reply.text


async def _the_kv_of_another_image_is_refused(servers: list[Server]) -> None:
    """A router that confuses two clients: the token ids are the same."""
    prefill, decode = (one.base_url for one in servers)
    async with httpx.AsyncClient(timeout=asks.STEP_SECONDS, trust_env=False) as http:

        async def post(url: str, seed: int, **more: Any) -> httpx.Response:
            body = {**ask("", seed, number=9).body, **more}
            return await http.post(f"{url}/v1/chat/completions", json=body)

        async def offered(seed: int) -> Any:
            reply = await post(prefill, seed, **OFFERS)
            return reply.json()["kv_transfer_params"]

        refused = await post(decode, 6, kv_transfer_params=await offered(5))
        assert refused.status_code == httpx.codes.INTERNAL_SERVER_ERROR and "cause=digest" in refused.text, refused.text
        right = await post(decode, 5, kv_transfer_params=await offered(5))
        assert right.status_code == httpx.codes.OK, right.text
