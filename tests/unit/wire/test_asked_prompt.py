# SPDX-License-Identifier: Apache-2.0
"""What decode sends of a prompt with images: whatever comes instead is refused in words, and no code runs."""

from __future__ import annotations

import pickle
import tracemalloc
from typing import Any

import msgspec
import pytest
from support.codecs import fuzz

from kvcached_nixl.wire.question import Data, Element, Feature, Prompt, Tensor
from kvcached_nixl.wire.question import decode_prompt as decode
from kvcached_nixl.wire.question import encode_prompt as encode

NUM_TOKENS = 40
IDS = bytes(4 * NUM_TOKENS)


def tensor(dtype: str = "float32", shape: tuple[int, ...] = (2, 3), data: bytes | None = None) -> Tensor:
    return Tensor(dtype, shape, memoryview(bytes(24) if data is None else data))


def packed(**elements: Element) -> msgspec.Raw:
    return msgspec.Raw(msgspec.msgpack.encode(elements))


def feature(offset: int = 2, length: int = 8, is_embed: bytes | None = None, **more: Any) -> Feature:
    fields: dict[str, Any] = {"item": packed(pixels=Element(tensor(), "batched")), **more}
    return Feature("image", "hash", offset, length, is_embed=is_embed, **fields)


def prompt(*features: Feature, **more: Any) -> Prompt:
    return Prompt("r", IDS, list(features or (feature(),)), **more)


def test_what_is_sent_comes_back() -> None:
    data: list[Data] = [tensor(), [tensor("int64", (3,)), tensor("bool", (24,))], 7, 0.5, True]
    elements = {
        "list": Element(data, "batched"),  # type: ignore[arg-type]
        "flat": Element(tensor(), "flat", 1, keep_on_cpu=True),
        "shared": Element(tensor("uint8", (0, 3), b""), "shared", 2),
    }
    sent = prompt(feature(item=packed(**elements)), feature(10, 4, b"\0\1\1\0"), salt="s", priority=-3)
    found = decode(bytearray(encode(sent)))
    assert next(found.elements()) == elements and len(list(found.elements())) == 2
    assert encode(found) == encode(sent)
    assert found.features[1].mask == b"\0\1\1\0" and found.features[0].mask == b"\1" * 8
    alone = Prompt("r", b"", [], embeddings=tensor())
    assert decode(encode(alone)) == alone
    both = Prompt("r", bytes(8), [], embeddings=tensor(), are_tokens=b"\0\1")
    assert decode(encode(both)) == both


def test_sounds_of_a_video_are_between_its_images() -> None:
    one, other = feature(2, 4, b"\1\0\1\0"), feature(2, 4, b"\0\1\0\1")
    assert len(decode(encode(prompt(one, other))).features) == 2


def fields(of: Any) -> dict[str, Any]:
    found: dict[str, Any] = msgspec.msgpack.decode(encode(of))
    return found


def changed(of: Any, **more: Any) -> bytes:
    return msgspec.msgpack.encode({**fields(of), **more})


def image(**more: Any) -> bytes:
    return changed(prompt(), features=[{**fields(feature()), **more}])


def numbers(**more: Any) -> bytes:
    return changed(Prompt("r", b"", [], embeddings=tensor()), embeddings={**fields(tensor()), **more})


BAD = {
    "nothing": b"",
    "no map": msgspec.msgpack.encode([1, 2]),
    "truncated": encode(prompt())[:-3],
    "nested without end": b"\x81\xa8features\x91\x81\xa4item" + b"\x91" * 100_000,
    "more than a prompt": encode(prompt()) + b"\xc0",
    "an unknown field": changed(prompt(), lora_path="/etc"),
    "an id that heartbeats would split": changed(prompt(), request_id="a,b"),
    "half an id": changed(prompt(), token_ids=bytes(5)),
    "both": changed(prompt(), embeddings=fields(tensor())),
    "a priority beyond 64 bits": changed(prompt(), priority=2**64 - 1, request_id=7),
    "a negative offset": image(offset=-1),
    "a negative length": image(length=-1),
    "no length": image(length=0),
    "beyond the prompt": image(offset=NUM_TOKENS - 7),
    "far beyond": image(length=2**31 - 1),
    "too long for 31 bits": image(length=2**31),
    "a mask that is too short": image(is_embed=b"\1"),
    "a mask that is too long": image(is_embed=b"\1" * 9),
    "a mask of nothing": image(is_embed=bytes(8)),
    "a mask of other bytes": image(is_embed=b"\2" * 8),
    "overlapping": changed(prompt(), features=[fields(feature()), fields(feature(9))]),
    "one token twice": changed(prompt(), features=[fields(feature(2, 2, b"\1\1")), fields(feature(3, 2, b"\1\1"))]),
    "pickle": image(item=msgspec.msgpack.Ext(1, pickle.dumps(print)), identifier=msgspec.msgpack.Ext(1, b"")),
    "too many": changed(prompt(), features=[fields(feature())] * 1025),
    "an unknown type": numbers(dtype="object"),
    "a type of no tensor": numbers(dtype="__class__"),
    "too few bytes": numbers(shape=[2, 4]),
    "a negative size": numbers(shape=[-2, -3]),
    "sizes beyond all memory": numbers(shape=[2**31 - 1] * 7 + [0], data=b""),
    "too many dimensions": numbers(shape=[1] * 9),
    "a tensor by reference": numbers(data=1),
    "embeddings of one dimension": numbers(shape=[6]),
    "embeddings of other tokens": changed(
        Prompt("r", bytes(8), [], embeddings=tensor(), are_tokens=b"\0\1"), token_ids=bytes(12)
    ),
    "embeddings, it is not said of which tokens": changed(
        Prompt("r", bytes(8), [], embeddings=tensor(), are_tokens=b"\0\1"), are_tokens=None
    ),
    "are_tokens of an image": changed(prompt(), are_tokens=bytes(NUM_TOKENS)),
}


@pytest.mark.parametrize("body", BAD.values(), ids=BAD)
def test_what_is_no_prompt_is_refused_in_words(body: bytes) -> None:
    with pytest.raises(ValueError, match="no prompt that kvcached_nixl sends"):
        decode(body)


EVIL: dict[str, Any] = {
    "pickle": {"a": msgspec.msgpack.Ext(1, pickle.dumps(print))},
    "a view that vLLM's own decoder takes": {"a": msgspec.msgpack.Ext(3, bytes(24))},
    "another method of vLLM's": {"a": {**fields(Element(tensor(), "batched")), "field": "flat_from_sizes"}},
    "another field": {"a": {**fields(Element(tensor(), "batched")), "slices": [1]}},
    "text": {"a": {"data": "text", "field": "batched"}},
    "nothing": {"a": {"data": None, "field": "batched"}},
    "a list too deep": {"a": {"data": [[[1]]], "field": "batched"}},
    "a list too long": {"a": {"data": [1] * 4097, "field": "batched"}},
    "a list too long in another": {"a": {"data": [[1] * 257], "field": "batched"}},
    "too many numbers": {"a": {"data": [[1] * 256] * 256, "field": "batched"}},
    "too many names": {str(name): {"data": 1, "field": "batched"} for name in range(65)},
    "a flat number": {"a": {"data": 1, "field": "flat"}},
    "a dimension that is not there": {"a": {"data": fields(tensor()), "field": "flat", "number": 2}},
    "another dimension of a list": {"a": {"data": [1], "field": "flat", "number": -1}},
    "no names": [1],
}


@pytest.mark.parametrize("item", EVIL.values(), ids=EVIL)
def test_what_is_no_image_is_refused(item: Any) -> None:
    sent = decode(encode(prompt(feature(item=msgspec.Raw(msgspec.msgpack.encode(item))))))
    with pytest.raises(ValueError):
        list(sent.elements())


def test_what_is_small_on_the_wire_and_large_in_memory_is_refused() -> None:
    """All images together: an empty list has one byte."""
    lists = Element([[]] * 4096, "batched")
    items = [feature(place, 1, item=packed(**{str(name): lists for name in range(4)})) for place in range(4)]
    sent = decode(encode(prompt(*items)))
    tracemalloc.start()
    with pytest.raises(ValueError, match="lists, tensors and numbers"):
        list(sent.elements())
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert len(list(decode(encode(prompt(*items[:3]))).elements())) == 3 and peak < 8 << 20


def test_whatever_comes_is_a_prompt_or_a_refusal() -> None:
    whole = encode(prompt(feature(is_embed=b"\0\1\1\1\1\1\1\0"), feature(12, 3), adapter="a", salt="s"))
    read = lambda body: list(decode(bytearray(body)).elements())  # noqa: E731
    assert min(fuzz(read, [whole], 4000, ValueError)) > 200
