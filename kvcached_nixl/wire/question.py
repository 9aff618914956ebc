# SPDX-License-Identifier: Apache-2.0
"""What decode asks of a prefill server, and what that answers. Pure data.

The request is one of vLLM's own (``vllm/entrypoints/openai/completion``), ``POST /v1/completions`` with token ids,
which vLLM's authentication guards and which ends when the connection does. Prefill computes the prompt and one token.

What has more than token ids, images, sounds, ..., or embeddings, goes to an endpoint of this package in msgpack, and so
does the question how much of a prompt is cached. Whoever reaches the endpoint can send anything: `decode_prompt`
refuses what vLLM's engine would end at, as far as that can be seen without the model. No bytes become code: there are
tensors of known types, numbers, and lists of them.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Annotated, Any, Literal

import msgspec
import numpy as np

from kvcached_nixl.wire.checked import Identifier, Malformed, decoder
from kvcached_nixl.wire.headroom import Computed, Ended
from kvcached_nixl.wire.params import HEADROOM_KEY, RemotePrefill, count_of, params_to_prefill

PATH = "v1/completions"
ROLE_HEADER = "X-Kvcached-Nixl-Role"
"""Of an answer that refuses a question for the server's role."""
MOST_ID = 200
_OF_SEVERAL = re.compile(r"_dp\d+\Z")
_ODD = re.compile(r"[^A-Za-z0-9._:-]")
_IS_LOST = re.compile(rb"reset reason: (connection.termination|remote reset|local reset)")
"""Envoy's 503 for a connection that was lost after the request was sent, which may have ended a server; others have
502. For a server that it could not reach it names another reason."""
_OF_SERVER = (401, 405, 407)
"""Statuses that it gives for any prompt, as redirections are. Another one of 400 to 499, but for 429, may be of a
prompt that is too large, or not liked by a firewall (403): others must not wait for it."""
_OF_CONNECTION = (408, 425)
"""Statuses with which the same prompt may be sent again: it came too slowly, or too early."""
LONGEST_RETRY_SECONDS = 60.0
"""A server that names a longer time is asked again after this."""
MOST_ANSWER_BYTES = 16 << 20
"""A manifest of a million tokens in blocks of 16 has less than a megabyte."""
ASKED_PATH = "v1/kvcached_nixl/prefill"
LOOK_UP_PATH = "v1/kvcached_nixl/cached"
"""How many tokens of a prompt are cached, and their KV, if wanted: nothing is computed."""
LEAST_TOKENS, MOST_SECONDS = "least_tokens", "most_seconds"
"""In its query: if so many tokens are cached, their KV is wanted; and how long the peer waits for the answer."""
MOST_BODY_BYTES = 256 << 20
MOST_SENT_BYTES = MOST_BODY_BYTES - (16 << 20)
"""Of tensors; names, positions and token ids have the rest."""
MOST_FEATURES = 1024
MOST_PARTS = 1 << 16
"""Lists, tensors and numbers of all features: an empty list has one byte on the wire, and a hundred in memory."""
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
_Row = _Leaf | Annotated[list[_Leaf], msgspec.Meta(max_length=256)]
Data = _Leaf | Annotated[list[_Row], msgspec.Meta(max_length=4096)]
"""Lengths are checked before a list is made."""


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


_Elements = Annotated[dict[str, msgspec.Raw], msgspec.Meta(max_length=64)]


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
        _check_features(self.features, num_tokens)

    def elements(self) -> Iterator[dict[str, Element]]:
        """The decoded ``item`` of each feature. Raises ValueError, before much of what is refused is in memory."""
        num_parts = 0
        for feature in self.features:
            found = {}
            for name, one in msgspec.msgpack.decode(feature.item, type=_Elements).items():
                found[name] = msgspec.msgpack.decode(one, type=Element)
                num_parts += _num_parts(found[name].data)
                if num_parts > MOST_PARTS:
                    raise ValueError(f"images, sounds, ... of more than {MOST_PARTS} lists, tensors and numbers")
            yield found


def _num_parts(data: Any) -> int:
    return 1 + sum(map(_num_parts, data)) if isinstance(data, list) else 1


def _check_features(features: Iterable[Feature], num_tokens: int) -> None:
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


_read_prompt: decoder[Prompt] = decoder(Prompt)


def decode_prompt(body: bytes | bytearray) -> Prompt:
    """Returns a prompt that shares its body's memory. Raises ValueError: found and expected, in words."""
    try:
        return _read_prompt(body)
    except Malformed as error:
        raise ValueError(f"This is no prompt that kvcached_nixl sends: {error}. Use the same version of it.") from error


def encode_prompt(prompt: Any) -> bytes:
    """Returns the body of a request to `ASKED_PATH`."""
    return msgspec.msgpack.encode(prompt)


@dataclass(frozen=True)
class Question:
    """A prompt whose KV is asked for.

    Attributes:
        adapter: name of its LoRA adapter; "" for none.
        transfer_id: push: under which decode registers its blocks; "" if it does so after the answer.
        trace_headers: W3C trace context, as it came.
        prompt: what is sent of one that has more than token ids.
    """

    request_id: str
    token_ids: Sequence[int] | None
    adapter: str = ""
    salt: str = ""
    priority: int = 0
    trace_headers: Mapping[str, str] | None = None
    transfer_id: str = ""
    prompt: Prompt | None = None

    @property
    def path(self) -> str:
        return PATH if self.prompt is None else ASKED_PATH

    @property
    def headers(self) -> Mapping[str, str]:
        kind = "application/json" if self.prompt is None else "application/msgpack"
        return {"Content-Type": kind, **(self.trace_headers or {})}

    def body(self) -> bytes:
        if self.prompt is not None:
            return encode_prompt(msgspec.structs.replace(self.prompt, transfer_id=self.transfer_id or None))
        found: dict[str, Any] = {
            "request_id": plain_id(self.request_id),
            "prompt": self.token_ids,
            "max_tokens": 1,
            "temperature": 0.0,
            "kv_transfer_params": params_to_prefill(self.transfer_id),
        }
        if self.priority:
            found["priority"] = self.priority
        if self.adapter:
            found["model"] = self.adapter
        if self.salt:
            found["cache_salt"] = self.salt
        return msgspec.json.encode(found)

    def look_up_body(self) -> bytes:
        """Of a request that asks how many of the tokens are cached; not for a prompt that has more than tokens."""
        token_ids = np.asarray(self.token_ids, "<u4").tobytes()
        return encode_prompt(Prompt(plain_id(self.request_id), token_ids, adapter=self.adapter, salt=self.salt))


def plain_id(request_id: str) -> str:
    """A request's id as prefill gets it. Heartbeats separate ids by commas."""
    return _ODD.sub("_", request_id)[:MOST_ID]


class Outcome(msgspec.Struct, frozen=True):
    """How asking a server has ended without an answer.

    Attributes:
        is_final: the server refuses this prompt, and would refuse it again.
        is_of_server: it would give this answer to any prompt.
        is_busy: the server cannot take requests now.
        is_of_adapter: it may be for the prompt's adapter, which the server lacks, or has in another version.
        is_of_engine: the engine that was named to decode is not there; the server may have another one by now.
        is_own: decode's own engine has answered.
        is_late: it has answered with an offer, and its KV has not come within the whole deadline.
        has_prompt: the server had the whole prompt when its connection ended, or has answered nothing since; or a
            balancer has lost the server, which may have had it.
        retry_after_seconds: what it said.
    """

    reason: str
    is_final: bool = False
    is_of_server: bool = False
    is_busy: bool = False
    is_of_adapter: bool = False
    is_of_engine: bool = False
    is_own: bool = False
    is_late: bool = False
    has_prompt: bool = False
    retry_after_seconds: float = 0.0

    @property
    def ended(self) -> Ended:
        if self.is_final:
            return Ended.REFUSED
        if self.is_busy:
            return Ended.BUSY
        return Ended.UNREACHABLE if self.is_of_server else Ended.FAILED

    @property
    def computed(self) -> Computed:
        """If the prompt is computed here after it."""
        if self.is_final:
            return Computed.REFUSED
        return Computed.UNREACHABLE if self.is_of_server else Computed.FAILED


class AskFailed(Exception):
    """A server has not answered with parameters; ``args[0]`` is an `Outcome`."""

    @property
    def outcome(self) -> Outcome:
        found: Outcome = self.args[0]
        return found


class _Answer(msgspec.Struct):
    kv_transfer_params: dict[str, Any] | None = None


def read_answer(status: int, headers: Mapping[str, str], body: bytes) -> dict[str, Any]:
    """Returns the ``kv_transfer_params`` of an answer. Raises `AskFailed`: it has none."""
    if status == 200:
        try:
            params = msgspec.json.decode(body, type=_Answer).kv_transfer_params
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            raise AskFailed(Outcome(f"its answer cannot be read: {error}")) from error
        if params is None:
            raise AskFailed(Outcome("it has computed the prompt, and offers no KV; expected kv_transfer_params"))
        return params
    reason = f"it answered HTTP {status}: {body[:300].decode(errors='replace')}"
    if status == 429 or (status == 503 and not _IS_LOST.search(body)):
        # One that computes no prompts for others now may not do so for long.
        is_busy, said = ROLE_HEADER not in headers, headers.get("Retry-After", "")
        seconds = min(float(said), LONGEST_RETRY_SECONDS) if said.isascii() and said.isdigit() else 0.0
        raise AskFailed(Outcome(reason, is_of_server=True, is_busy=is_busy, retry_after_seconds=seconds))
    is_of_server = status < 400 or status in _OF_SERVER
    is_final = not is_of_server and status < 500 and status not in _OF_CONNECTION
    # Of a balancer, which may have lost the server with the prompt.
    has_prompt, is_of_adapter = status in (502, 503, 504), status == 404
    raise AskFailed(Outcome(reason, is_final, is_of_server, is_of_adapter=is_of_adapter, has_prompt=has_prompt))


def engine_in(params: Mapping[str, Any]) -> RemotePrefill | None:
    """The engine that has answered, if it is the only one behind its URL: vLLM names those of data parallelism so."""
    try:
        found = msgspec.convert(params, RemotePrefill)
    except msgspec.ValidationError:
        return None
    return None if _OF_SEVERAL.search(found.engine_id) else found


def queued_tokens_in(params: Mapping[str, Any]) -> int:
    """How many tokens of prompts wait at a server, by its answer; 0 if that does not say so."""
    headroom = params.get(HEADROOM_KEY)
    return count_of(headroom.get("queued_tokens")) if isinstance(headroom, Mapping) else 0
