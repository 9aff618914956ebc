# SPDX-License-Identifier: Apache-2.0
"""Types for input from outside. A client, a router or a peer may send anything: decoding into these types gives values
that need no further check, or one exception (`Malformed`) that names the field.
"""

from __future__ import annotations

from typing import Annotated, Any, Generic, TypeAlias, TypeVar

import msgspec

from kvcached_nixl.ids import KernelBlock, LogicalBlock

MAX_TP_SIZE = 256
MAX_TOKENS = 2**31 - 1
_SHOWN = 500
"""Characters that are kept of an error: it names unknown fields, which may have any length."""

Identifier: TypeAlias = Annotated[str, msgspec.Meta(min_length=1, max_length=1024, pattern=r"^[^\ud800-\udfff]*\Z")]
"""Lone surrogates are refused: JSON can spell them, but UTF-8 cannot encode them."""
Port: TypeAlias = Annotated[int, msgspec.Meta(ge=1, le=65535)]
TpSize: TypeAlias = Annotated[int, msgspec.Meta(ge=1, le=MAX_TP_SIZE)]
Rank: TypeAlias = Annotated[int, msgspec.Meta(ge=0, lt=MAX_TP_SIZE)]
BlockNumber: TypeAlias = Annotated[int, msgspec.Meta(ge=0, le=2**31 - 1)]
"""A block in vLLM's own parameters, which this package does not use."""
LogicalBlockNumber: TypeAlias = Annotated[LogicalBlock, msgspec.Meta(ge=0, le=2**31 - 1)]
KernelBlockNumber: TypeAlias = Annotated[KernelBlock, msgspec.Meta(ge=0, le=2**31 - 1)]
Count: TypeAlias = Annotated[int, msgspec.Meta(ge=0, le=MAX_TOKENS)]
"""A number of tokens, or of tokens in a block."""
Seconds: TypeAlias = Annotated[float, msgspec.Meta(gt=0, le=86_400)]
Digest: TypeAlias = Annotated[str, msgspec.Meta(pattern=r"^[0-9a-f]{32}\Z")]
Incarnation: TypeAlias = Annotated[str, msgspec.Meta(pattern=r"^[0-9a-f]{16}\Z")]
"""A number drawn when an engine starts. Not an int: a router's JSON may round integers above 2**53."""

T = TypeVar("T")


class Malformed(ValueError):
    """Input from outside is invalid. Drop or refuse the message or request that it belongs to, and nothing else."""


def require(holds: bool, expected: str) -> None:
    """For ``__post_init__`` of a message: msgspec turns the ValueError into its ValidationError."""
    if not holds:
        raise ValueError(f"expected {expected}")


def convert(value: Any, kind: type[T]) -> T:
    """Checks plain Python values, as JSON gives them, against a type. Raises `Malformed`, which names the field.

    Whole numbers may be floats: a router that keeps parameters in protobuf's Struct has no other numbers.
    """
    try:
        try:
            return msgspec.convert(value, kind)
        except msgspec.ValidationError as error:
            # Only then: it copies everything, and this may be the engine's thread.
            if "`float`" not in str(error):
                raise
            return msgspec.convert(_with_whole_numbers(value), kind)
    except (msgspec.ValidationError, RecursionError, OverflowError, UnicodeError) as error:
        raise Malformed(f"{error!s:.{_SHOWN}}") from error


def _with_whole_numbers(value: Any) -> Any:
    kind = type(value)
    if kind is float:
        return int(value) if value.is_integer() else value
    if kind is dict:
        return {key: _with_whole_numbers(one) for key, one in value.items()}
    if kind is list:
        return [one if type(one) is int else _with_whole_numbers(one) for one in value]
    return value


class decoder(Generic[T]):
    """Decodes msgpack into one type. Call it with bytes; its only exception is `Malformed`, whatever the bytes."""

    def __init__(self, kind: Any) -> None:
        self._decoder: msgspec.msgpack.Decoder[T] = msgspec.msgpack.Decoder(kind)

    def __call__(self, encoded: bytes | bytearray) -> T:
        try:
            return self._decoder.decode(encoded)
        except (msgspec.MsgspecError, RecursionError, OverflowError, UnicodeError) as error:
            raise Malformed(f"{error!s:.{_SHOWN}}") from error
