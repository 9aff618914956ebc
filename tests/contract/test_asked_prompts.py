# SPDX-License-Identifier: Apache-2.0
"""Prompts with images and of embeddings: from vLLM's own objects on decode, through vLLM's own application, to what
prefill's engine is given."""

from __future__ import annotations

import asyncio
import pickle
from collections.abc import AsyncIterator, Iterator
from types import SimpleNamespace
from typing import Any

import httpx
import msgspec
import numpy as np
import pytest
import torch
from support.over_sockets import vllm_application
from support.patches import applied
from vllm.lora.request import LoRARequest
from vllm.multimodal.inputs import (
    MultiModalFeatureSpec,
    MultiModalFieldConfig,
    MultiModalFieldElem,
    MultiModalKwargsItem,
    PlaceholderRange,
)
from vllm.multimodal.utils import group_and_batch_mm_kwargs

from kvcached_nixl.patching import Call, Registry
from kvcached_nixl.vllm.adapter.asked_prompts import identifier_of, sent_prompt
from kvcached_nixl.vllm.patches import answering, frontend, patches_in
from kvcached_nixl.wire.question import ASKED_PATH, LOOK_UP_PATH, MOST_SENT_BYTES, Prompt, Question, encode_prompt

HIDDEN = 8
IDS = list(range(40))
PARAMS = {"remote_engine_id": "e"}
KEY = {"Authorization": "Bearer key"}
PRODUCER = {"kv_connector": "NixlConnector", "kv_role": "kv_producer"}


@pytest.fixture(autouse=True)
def patched() -> Iterator[Registry]:
    with applied((*patches_in(frontend), *patches_in(answering))) as registry:
        yield registry


class Client:
    """The API server's client of an engine that answers at once."""

    def __init__(self) -> None:
        self.asked: list[tuple[Any, Any, str, dict[str, Any]]] = []
        self.mirrored: list[str] = []
        self.calls: list[tuple[Any, ...]] = []
        self.engine_core = SimpleNamespace(_call_utility_async=self._call, core_engine="first")
        self.model_config = SimpleNamespace(
            get_hidden_size=lambda: HIDDEN,
            get_vocab_size=lambda: 100,
            dtype=torch.bfloat16,
            enable_prompt_embeds=True,
            max_model_len=len(IDS),
            multimodal_config=SimpleNamespace(mm_processor_cache_type="lru"),
        )
        cache = SimpleNamespace(get_and_update_item=lambda item, key: self.mirrored.append(key))
        info = SimpleNamespace(validate_num_items=self._validate)
        self.renderer = SimpleNamespace(
            _mm_executor=None, mm_processor_cache=cache, get_mm_processor=lambda: SimpleNamespace(info=info)
        )

    @staticmethod
    def _validate(modality: str, count: int) -> None:
        if modality != "image" or count > 2:
            raise ValueError(f"At most 2 images, not {count} {modality}")

    async def _call(self, *call: Any, engine: str) -> Any:
        assert engine == "first"
        self.calls.append(call)
        return PARAMS

    async def is_tracing_enabled(self) -> bool:
        return True

    async def generate(self, prompt: Any, params: Any, request_id: str, **more: Any) -> AsyncIterator[Any]:
        self.asked.append((prompt, params, request_id, more))
        yield SimpleNamespace(kv_transfer_params=PARAMS)


@pytest.fixture
def client() -> Client:
    return Client()


def served(client: Client, **transfer: Any) -> Any:
    app, _ = vllm_application({**PRODUCER, **transfer})
    app.state.engine_client = client
    app.state.openai_serving_models = SimpleNamespace(lora_requests={"adapter": LoRARequest("adapter", 1, "/adapter")})
    return app


def post(app: Any, body: bytes, path: str = ASKED_PATH, **headers: str) -> httpx.Response:
    async def run() -> httpx.Response:
        transport = httpx.ASGITransport(app=app)
        async with httpx.AsyncClient(transport=transport, base_url="http://prefill") as http:
            return await http.post(f"/{path}", content=body, headers={**KEY, **headers})

    return asyncio.run(run())


def item(seed: int = 0) -> MultiModalKwargsItem:
    pixels = torch.randn((4, 6), generator=torch.Generator().manual_seed(seed)).to(torch.bfloat16)
    fields = {
        "pixels": (pixels, MultiModalFieldConfig.flat("image", [slice(0, 4)])),
        "grid": (torch.tensor([1, 2, 2]), MultiModalFieldConfig.batched("image", keep_on_cpu=True)),
        "sizes": ([torch.tensor(3), 2.5, 4], MultiModalFieldConfig.shared("image", 1)),
    }
    return MultiModalKwargsItem({k: MultiModalFieldElem(data=d, field=f.field) for k, (d, f) in fields.items()})


def feature(offset: int, seed: int = 0, **more: Any) -> MultiModalFeatureSpec:
    mask = torch.tensor([True, False, True, True])
    fields: dict[str, Any] = {"data": item(seed), "identifier": f"lora:hash{seed}", "mm_hash": f"hash{seed}", **more}
    return MultiModalFeatureSpec(modality="image", mm_position=PlaceholderRange(offset, 4, mask), **fields)


def request(*features: MultiModalFeatureSpec, **more: Any) -> Any:
    fields = {
        "prompt_token_ids": IDS,
        "mm_features": list(features),
        "prompt_embeds": None,
        "prompt_is_token_ids": None,
        "cache_salt": "salt",
        "priority": 3,
        **more,
    }
    return SimpleNamespace(**fields)


def sent(asked: Any, adapter: str = "") -> Prompt:
    found = sent_prompt(asked, "r", adapter)
    assert found is not None
    return found


def body_of(asked: Any, adapter: str = "") -> bytes:
    return encode_prompt(sent(asked, adapter))


def batched(prompt: Any) -> Any:
    items = [("image", one) for one in prompt["mm_kwargs"]["image"]]
    return list(group_and_batch_mm_kwargs(items))


def test_images_arrive_as_they_were(client: Client) -> None:
    first, second = feature(2), feature(10, 1)
    asked = sent(request(first, second), "adapter")
    body = Question("r", IDS, prompt=asked, transfer_id="t").body()
    reply = post(served(client), body, traceparent="00-1-2-01")
    assert reply.status_code == 200 and reply.json() == {"kv_transfer_params": PARAMS}, reply.text
    ((prompt, params, request_id, more),) = client.asked
    assert (prompt["type"], prompt["prompt_token_ids"], prompt["cache_salt"]) == ("multimodal", IDS, "salt")
    assert prompt["mm_placeholders"] == {"image": [first.mm_position, second.mm_position]}
    for got, before in zip(prompt["mm_kwargs"]["image"], (first.data, second.data), strict=True):
        assert got == before and {key: one.field.keep_on_cpu for key, one in got.items()} == {
            "pixels": False,
            "grid": True,
            "sizes": False,
        }
    ((_, count, data),) = batched(prompt)
    ((_, _, expected),) = group_and_batch_mm_kwargs([("image", first.data), ("image", second.data)])
    assert count == 2 and torch.equal(data["pixels"], expected["pixels"]) and data["sizes"] == expected["sizes"]
    assert (params.max_tokens, params.temperature, params.detokenize) == (1, 0.0, False)
    wishes = {"do_remote_decode": True, "do_remote_prefill": False, "transfer_id": "t"}
    assert params.extra_args["kv_transfer_params"].items() >= wishes.items()
    assert request_id == "r" and more["lora_request"].lora_int_id == 1
    assert more["priority"] == 3 and more["trace_headers"] == {"traceparent": "00-1-2-01"}
    # The engine's cache gets what the API server's knows.
    assert client.mirrored == prompt["mm_hashes"]["image"]


@pytest.mark.parametrize(("allowed", "status"), [("1", 200), ("0", 404)])
def test_an_adapter_that_a_resolver_finds_is_loaded_where_vllm_may(
    client: Client, allowed: str, status: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By the first prompt that names it, whether it has images or not."""
    monkeypatch.setenv("VLLM_ALLOW_RUNTIME_LORA_UPDATING", allowed)
    app = served(client)
    loaded = app.state.openai_serving_models.lora_requests

    async def resolve_lora(name: str) -> None:
        loaded[name] = LoRARequest(name, 2, "/found")

    app.state.openai_serving_models.resolve_lora = resolve_lora
    for _ in range(2):
        assert post(app, body_of(request(feature(0)), "new")).status_code == status
    assert [more["lora_request"].lora_int_id for *_, more in client.asked] == [2, 2] * (status == 200)


def test_an_image_is_known_by_its_bytes(client: Client) -> None:
    """Two clients may give two images one identifier; the digest has what decode has."""
    app = served(client)
    for one in (feature(2), feature(2), feature(2, 1, mm_hash="hash0")):
        assert post(app, body_of(request(one))).status_code == 200
    first, again, other = (prompt["mm_hashes"]["image"][0] for prompt, *_ in client.asked)
    assert first == again != other
    for key in (first, other):
        assert identifier_of(SimpleNamespace(mm_hash=key, identifier=f"adapter:{key}")) == "hash0"
    assert identifier_of(feature(2)) == "hash0"


def test_no_client_names_its_image_as_another_one() -> None:
    """Prefill would use it for other users' requests. Its names can be computed from the picture that they send."""
    model = SimpleNamespace(multimodal_config=SimpleNamespace(mm_processor_cache_gb=1))
    cache = SimpleNamespace(enable_prefix_caching=True)
    renderer = SimpleNamespace(model_config=model, config=SimpleNamespace(cache_config=cache))
    for name in (f"kvcached_nixl:{'0' * 32}:hash", "0" * 64):
        named = {"image": [name, None], "audio": None}
        found = frontend.process_mm_uuids.wrapper(Call(lambda named=named: named, renderer, (), {}))
        assert found == {"image": [f"client:{name}", None], "audio": None}


SHARED = ("address", "monotonic_id", "signature")


def handle_of(data: Any) -> MultiModalFieldElem:
    return MultiModalFieldElem(data=data, field=MultiModalFieldConfig.batched("image").field)


NOT_SENT = {
    "data that are only in the engine's cache": request(feature(2, data=None)),
    "one input of which is": request(feature(2, data=MultiModalKwargsItem({"a": handle_of(None)}))),
    "data in shared memory": request(feature(2, data=MultiModalKwargsItem({k: handle_of(1) for k in SHARED}))),
    "data on a device": request(prompt_token_ids=None, prompt_embeds=torch.empty((2, HIDDEN), device="meta")),
    "sparse data": request(prompt_token_ids=None, prompt_embeds=torch.zeros((2, HIDDEN)).to_sparse()),
    "complex numbers": request(prompt_token_ids=None, prompt_embeds=torch.empty((2, HIDDEN), dtype=torch.complex64)),
    "too much": request(prompt_token_ids=None, prompt_embeds=torch.empty((MOST_SENT_BYTES + 1, 1), dtype=torch.int8)),
}


@pytest.mark.parametrize("asked", NOT_SENT.values(), ids=NOT_SENT)
def test_what_is_not_sent(asked: Any) -> None:
    assert sent_prompt(asked, "r", "") is None


def embeddings(width: int = HIDDEN, dtype: torch.dtype = torch.bfloat16) -> bytes:
    return body_of(request(prompt_token_ids=None, prompt_embeds=torch.zeros((3, width), dtype=dtype)))


def ids(*found: int, are_tokens: list[bool] | None = None) -> bytes:
    more = {"prompt_embeds": torch.zeros((len(found), HIDDEN), dtype=torch.bfloat16)}
    return body_of(request(prompt_token_ids=found, prompt_is_token_ids=are_tokens or [True] * len(found), **more))


def image(**more: Any) -> bytes:
    whole = sent(request(feature(2)))
    return encode_prompt(msgspec.structs.replace(whole, features=[msgspec.structs.replace(whole.features[0], **more)]))


REFUSED = {
    "no prompt": b"\x80",
    "pickle": image(item=msgspec.Raw(msgspec.msgpack.encode({"pixels": msgspec.msgpack.Ext(1, pickle.dumps(print))}))),
    "a model without sounds": image(modality="audio"),
    "more images than this server takes": body_of(request(*(feature(4 * place) for place in range(3)))),
    "more tokens than this server takes": body_of(request(feature(2), prompt_token_ids=[*IDS, 1])),
    "lists without an end": image(
        item=msgspec.Raw(msgspec.msgpack.encode({"a": {"data": [[]] * 5000, "field": "batched"}}))
    ),
    "embeddings of another size": embeddings(HIDDEN + 1),
    "embeddings of another type": embeddings(dtype=torch.float32),
    "tokens that the model does not have, at which its engine would end": ids(1, 100),
    "tokens that vLLM cannot even copy": ids(1, 2**32 - 1),
    "what stands for an embedding, and vLLM cannot copy": ids(1, 2**31, are_tokens=[True, False]),
}


@pytest.mark.parametrize("body", REFUSED.values(), ids=REFUSED)
def test_what_the_model_does_not_take_is_refused(body: bytes, client: Client, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_ALLOW_INSECURE_SERIALIZATION", "1")
    reply = post(served(client), body)
    assert reply.status_code == 400 and not client.asked, reply.text


def test_what_stands_for_an_embedding_need_be_no_token_of_the_model(client: Client) -> None:
    """vLLM adds its placeholder to the tokenizer, behind a vocabulary that may be full: 128256 with Llama 3."""
    assert post(served(client), ids(1, 100, are_tokens=[True, False])).status_code == 200 and client.asked


def test_how_much_of_a_prompt_is_cached_is_asked_of_the_engine(client: Client) -> None:
    asked = Question("r", IDS, "adapter", salt="salt")
    app, body = served(client), asked.look_up_body()
    assert post(app, body, LOOK_UP_PATH, Authorization="Bearer other").status_code == 401
    assert post(app, body_of(request(feature(2))), LOOK_UP_PATH).status_code == 400
    for ids in ([], [*IDS, 1]):
        assert post(app, Question("r", ids).look_up_body(), LOOK_UP_PATH).status_code == 400, "no model takes these"
    assert not client.calls
    assert post(app, body).status_code == 400, "prefill computes prompts of tokens at /v1/completions"
    assert post(app, Question("r", IDS, "unknown").look_up_body(), LOOK_UP_PATH).status_code == 404
    for query in (
        "least_tokens=many",
        "least_tokens=-1",
        f"least_tokens={2**64}",
        "most_seconds=nan",
        "most_seconds=inf",
    ):
        assert post(app, body, f"{LOOK_UP_PATH}?{query}").status_code == 400
    assert not client.calls
    for query in ("", "?most_seconds=0", "?most_seconds=1e9"):
        post(app, body, f"{LOOK_UP_PATH}{query}")
    longest = [seconds for *_, seconds in client.calls]
    client.calls.clear()
    assert longest == [answering.LONGEST_LOOK_UP_SECONDS] * 3, "whoever names no end may leave at once"
    reply = post(app, body, f"{LOOK_UP_PATH}?least_tokens=2&most_seconds=0.5")
    assert reply.status_code == 200 and reply.json() == {"kv_transfer_params": PARAMS}, reply.text
    ids = np.asarray(IDS, "<u4").tobytes()
    (call,) = client.calls
    assert (
        call == ("kvcached_nixl_look_up", ids, "r", LoRARequest("adapter", 1, "/adapter"), "salt", 2, 0.5)
        and not client.asked
    )


def test_only_prefill_answers_and_only_with_the_key(client: Client) -> None:
    body = body_of(request(feature(2)))
    assert post(served(client), body, Authorization="Bearer other").status_code == 401
    assert post(served(client, kv_role="kv_consumer"), body).status_code == 404
    reply = post(served(client), body_of(request(feature(2)), "unknown"))
    assert reply.status_code == 404 and "unknown" in reply.text
    assert not client.asked


def test_bodies_are_bounded(client: Client, monkeypatch: pytest.MonkeyPatch) -> None:
    app, body = served(client), body_of(request(feature(2)))
    monkeypatch.setattr(answering, "MOST_BODY_BYTES", len(body) - 1)
    assert post(app, body).status_code == 413
    assert post(app, body, **{"Content-Length": "1"}).status_code == 413, "whatever its headers say"
    monkeypatch.setattr(answering, "MOST_BODY_BYTES", len(body))
    monkeypatch.setattr(answering, "MOST_HELD_BYTES", len(body) - 1)
    assert post(app, body).status_code == 503
    monkeypatch.setattr(answering, "MOST_HELD_BYTES", len(body))
    for _ in range(3):
        assert post(app, body).status_code == 200, "what was held before is given back"
    monkeypatch.setattr(answering, "READ_SECONDS", 0.0)
    assert asyncio.run(status_of_one_that_sends(app, ASKED_PATH)) == 408


@pytest.mark.parametrize("leaves", [False, True])
def test_the_load_of_a_server_is_that_of_its_peers(client: Client, leaves: bool) -> None:
    """``--enable-server-load-tracking``: vLLM takes one that leaves off the load."""
    loads: list[int] = []

    async def look_up(*call: Any, engine: str) -> Any:
        loads.append(app.state.server_load_metrics)
        if leaves:
            await asyncio.Event().wait()

    client.engine_core._call_utility_async = look_up
    app = served(client)
    app.state.enable_server_load_tracking, app.state.server_load_metrics = True, 0
    body = {"type": "http.request", "body": Question("r", IDS).look_up_body(), "more_body": False}
    for _ in range(2):
        gone = [{"type": "http.disconnect"}] if leaves else []
        asyncio.run(status_of_one_that_sends(app, LOOK_UP_PATH, body, *gone))
    assert app.state.server_load_metrics == 0 and (leaves or loads == [1, 1])


async def status_of_one_that_sends(app: Any, path: str, *messages: Any) -> int:
    """And then nothing more."""
    found: list[int] = []
    left = iter(messages)

    async def receive() -> Any:
        return next(left, None) or await asyncio.Event().wait()

    async def send(message: Any) -> None:
        found.extend([message["status"]] if "status" in message else [])

    headers = [(name.lower().encode(), value.encode()) for name, value in KEY.items()]
    scope = {"type": "http", "method": "POST", "path": f"/{path}", "headers": headers, "query_string": b""}
    await app({**scope, "root_path": "", "http_version": "1.1", "scheme": "http"}, receive, send)
    return found[0]
