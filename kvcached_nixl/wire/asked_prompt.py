# SPDX-License-Identifier: Apache-2.0
"""A prompt with images, sounds, ..., or of embeddings, as decode sends it to prefill's endpoint. Pure data, in msgpack.

Whoever reaches the endpoint can send anything: `decode` refuses what vLLM's engine would end at, as far as that can be
seen without the model. No bytes become code: there are tensors of known types, numbers, and lists of them.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from types import MappingProxyType
from typing import Annotated, Any, Literal

import msgspec

from kvcached_nixl.wire.checked import Identifier

ASKED_PATH = "v1/kvcached_nixl/prefill"
LOOK_UP_PATH = "v1/kvcached_nixl/cached"
"""How many tokens of a prompt are cached, and their KV, if wanted: nothing is computed."""
LEAST_TOKENS, MOST_SECONDS = "least_tokens", "most_seconds"
"""In its query: if so many tokens are cached, their KV is wanted; and how long the peer waits for the answer."""
MOST_BODY_BYTES = 256 << 20
MOST_SENT_BYTES = MOST_BODY_BYTES - (16 << 20)
"""Of tensors; names, positions and token ids have the rest."""
MOST_FEATURES = 1024
WIDTHS: Mapping[str, int] = MappingProxyType(
    {
        **{"bool": 1, "uint8": 1, "int8": 1, "int16": 2, "int32": 4, "int64": 8},
        **{"float16": 2, "bfloat16": 2, "float32": 4, "float64": 8},
    }
)
"""torch's names of types -> bytes of a number."""

_Name = Annotated[str, msgspec.Meta(min_length=1, max_length=1024)]
_Place = Annotated[int, msgspec.Meta(ge=0, lt=2**31)]


class Tensor(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A tensor in a processor's memory, row by row."""

    dtype: str
    shape: Annotated[tuple[_Place, ...], msgspec.Meta(max_length=8)]
    data: memoryview

    def __post_init__(self) -> None:
        if self.dtype not in WIDTHS:
            raise ValueError(f"a tensor of {self.dtype[:40]!r}; expected one of {', '.join(WIDTHS)}")
        is_huge = math.prod(max(1, size) for size in self.shape) > MOST_BODY_BYTES
        if is_huge or math.prod(self.shape) * WIDTHS[self.dtype] != len(self.data):
            raise ValueError(f"a tensor {self.shape} of {self.dtype} has {len(self.data)} bytes")


_Leaf = Tensor | bool | int | float
Data = _Leaf | list[_Leaf | list[_Leaf | list[_Leaf]]]


class Element(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One of the inputs that a model takes for an image, a sound, ...

    Attributes:
        field: how vLLM joins those of several images.
        number: of a flat field the dimension, of a shared one how many share it.
    """

    data: Data
    field: Literal["batched", "flat", "shared"]
    number: Annotated[int, msgspec.Meta(ge=-8, lt=2**31)] = 0
    keep_on_cpu: bool = False

    def __post_init__(self) -> None:
        if self.field == "flat":
            # vLLM joins lists in their only dimension.
            least, most = (-len(self.data.shape), len(self.data.shape)) if isinstance(self.data, Tensor) else (0, 1)
            if isinstance(self.data, (int, float)) or not least <= self.number < most:
                raise ValueError(f"a flat field of dimension {self.number}, beyond its data")


class Feature(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """An image, a sound, ... of a prompt.

    Attributes:
        identifier: vLLM's hash of it.
        item: `Element` by name; its bytes identify what they say.
        is_embed: for each of ``length`` tokens, 1 if the model's embedding of the image stands there; None: for all.
    """

    modality: _Name
    identifier: _Name
    offset: _Place
    length: Annotated[int, msgspec.Meta(ge=1, lt=2**31)]
    item: msgspec.Raw
    is_embed: bytes | None = None

    @property
    def mask(self) -> bytes:
        return bytes([1]) * self.length if self.is_embed is None else self.is_embed

    def elements(self) -> dict[str, Element]:
        """The decoded ``item``. Raises msgspec.ValidationError."""
        return msgspec.msgpack.decode(self.item, type=dict[str, Element])


class Prompt(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What prefill is to compute, or to look up. It may have features, or embeddings.

    Attributes:
        token_ids: 32 bits each, little-endian; none for a prompt of embeddings only.
        are_tokens: for a prompt of both, 1 where the token's id counts, 0 where its embedding does.
    """

    request_id: Annotated[str, msgspec.Meta(pattern="^[A-Za-z0-9._:-]{1,200}$")]
    token_ids: bytes
    features: Annotated[list[Feature], msgspec.Meta(max_length=MOST_FEATURES)] = []
    embeddings: Tensor | None = None
    are_tokens: bytes | None = None
    adapter: str = ""
    salt: str = ""
    priority: int = 0
    transfer_id: Identifier | None = None

    def __post_init__(self) -> None:
        num_tokens, rest = divmod(len(self.token_ids), 4)
        if rest or (self.embeddings is not None and self.features):
            raise ValueError("a prompt has ids of 4 bytes, and not both features and embeddings")
        if self.embeddings is not None:
            shape = self.embeddings.shape
            # Without ids all are embeddings; with them, it is said for each token.
            tokens = None if self.are_tokens is None else len(self.are_tokens)
            if len(shape) != 2 or (num_tokens, tokens) not in ((0, None), (shape[0], shape[0])):
                raise ValueError(f"embeddings {shape} of {num_tokens} token ids, of which {tokens} are known")
        elif self.are_tokens is not None:
            raise ValueError("are_tokens without embeddings")
        _check(self.features, num_tokens)


def _check(features: Iterable[Feature], num_tokens: int) -> None:
    """Sounds of a video may be between its images, but no token is embedded twice."""
    taken = bytearray(num_tokens)
    for one in features:
        place = slice(one.offset, one.offset + one.length)
        if place.stop > num_tokens:
            raise ValueError(f"{one.modality} at {place.start} to {place.stop}, beyond {num_tokens} tokens")
        mask, here = (int.from_bytes(found, "little") for found in (one.mask, taken[place]))
        if len(one.mask) != one.length or not mask or max(one.mask) > 1:
            raise ValueError(f"{one.modality} at {one.offset}: is_embed is not {one.length} times 0 or 1, or all 0")
        if mask & here:
            raise ValueError(f"{one.modality} at {one.offset}: a token belongs to two images, sounds, ...")
        taken[place] = (mask | here).to_bytes(one.length, "little")


def decode(body: bytes | bytearray) -> Prompt:
    """Returns a prompt that shares its body's memory. Raises ValueError: found and expected, in words."""
    try:
        return msgspec.msgpack.decode(body, type=Prompt)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise ValueError(f"This is no prompt that kvcached_nixl sends: {error}. Use the same version of it.") from error


def encode(prompt: Any) -> bytes:
    """Returns the body of a request to `ASKED_PATH`."""
    return msgspec.msgpack.encode(prompt)
