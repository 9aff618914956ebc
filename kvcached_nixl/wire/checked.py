# SPDX-License-Identifier: Apache-2.0
"""Types for what comes from outside: msgspec refuses what is out of range before anything is done with it.

A client, a router and a peer may send anything. Whoever decodes into these types gets values that can be used without
another look, or one exception (`Malformed`) that names the field.
"""

from __future__ import annotations

from typing import Annotated, Any, TypeAlias, TypeVar

import msgspec

from kvcached_nixl.ids import KernelBlock, LogicalBlock

__all__ = [
    "MAX_TP_SIZE",
    "BlockNumber",
    "Count",
    "Digest",
    "Identifier",
    "KernelBlockNumber",
    "LogicalBlockNumber",
    "Malformed",
    "Port",
    "Rank",
    "Seconds",
    "Incarnation",
    "TpSize",
    "convert",
    "decoder",
    "require",
]

MAX_TP_SIZE = 1024
MAX_TOKENS = 2**31 - 1
_SHOWN = 500
"""Characters of an error: it names unknown fields, which may be of any length."""

Identifier: TypeAlias = Annotated[str, msgspec.Meta(min_length=1, max_length=1024, pattern=r"^[^\ud800-\udfff]*\Z")]
"""JSON can spell half a character, which nobody can send on."""
Port: TypeAlias = Annotated[int, msgspec.Meta(ge=1, le=65535)]
TpSize: TypeAlias = Annotated[int, msgspec.Meta(ge=1, le=MAX_TP_SIZE)]
Rank: TypeAlias = Annotated[int, msgspec.Meta(ge=0, lt=MAX_TP_SIZE)]
BlockNumber: TypeAlias = Annotated[int, msgspec.Meta(ge=0, le=2**31 - 1)]
"""Of a block that only vLLM's own parameters name."""
LogicalBlockNumber: TypeAlias = Annotated[LogicalBlock, msgspec.Meta(ge=0, le=2**31 - 1)]
KernelBlockNumber: TypeAlias = Annotated[KernelBlock, msgspec.Meta(ge=0, le=2**31 - 1)]
Count: TypeAlias = Annotated[int, msgspec.Meta(ge=0, le=MAX_TOKENS)]
"""Tokens, or tokens in a block."""
Seconds: TypeAlias = Annotated[float, msgspec.Meta(gt=0, le=86_400)]
Digest: TypeAlias = Annotated[str, msgspec.Meta(pattern=r"^[0-9a-f]{32}\Z")]
Incarnation: TypeAlias = Annotated[str, msgspec.Meta(pattern=r"^[0-9a-f]{16}\Z")]
"""A number drawn when an engine starts. Not an int: JSON in a router may round what is above 2**53."""

T = TypeVar("T")


class Malformed(ValueError):
    """What came from outside is not what it should be. Drop or refuse what it belongs to; nothing else may follow."""


def require(holds: bool, expected: str) -> None:
    """For ``__post_init__`` of a message: msgspec turns this into its ValidationError."""
    if not holds:
        raise ValueError(f"expected {expected}")


def convert(value: Any, kind: type[T]) -> T:
    """Check plain Python values, as JSON makes them, against a type.

    Raises:
        Malformed: they do not fit; the message says where.
    """
    try:
        return msgspec.convert(value, kind)
    except (msgspec.ValidationError, RecursionError, OverflowError, UnicodeError) as error:
        raise Malformed(f"{error!s:.{_SHOWN}}") from error


class decoder:
    """Reads msgpack of one type. Called with bytes; raises `Malformed`, whatever they are."""

    def __init__(self, kind: Any) -> None:
        self._decoder: msgspec.msgpack.Decoder[Any] = msgspec.msgpack.Decoder(kind)

    def __call__(self, encoded: bytes) -> Any:
        try:
            return self._decoder.decode(encoded)
        except (msgspec.MsgspecError, RecursionError, OverflowError, UnicodeError) as error:
            raise Malformed(f"{error!s:.{_SHOWN}}") from error
