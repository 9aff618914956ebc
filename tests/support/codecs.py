# SPDX-License-Identifier: Apache-2.0
"""What tests of readers have in common: fields that are changed one at a time, and bytes that are changed at random."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from kvcached_nixl.wire.checked import Malformed

__all__ = ["each", "fuzz", "plain_id"]


def each(**fields: Iterable[Any]) -> list[dict[str, Any]]:
    """Returns changes of one field each: ``each(a=[1, 2], b=[3])`` is a=1, a=2 and b=3."""
    return [{name: value} for name, values in fields.items() for value in values]


def fuzz(
    read: Callable[[bytes], object], sound: Sequence[bytes], times: int, refusal: type[Exception] = Malformed
) -> tuple[int, int]:
    """Reads mutations of sound bytes; anything but ``refusal`` is raised. Returns how many were read, and refused."""
    draw = random.Random(len(sound[0]))
    num_read = 0
    for number in range(times):
        try:
            read(_mutated(sound[number % len(sound)], sound, draw))
        except refusal:
            continue
        num_read += 1
    return num_read, times - num_read


def _mutated(encoded: bytes, others: Sequence[bytes], draw: random.Random) -> bytes:
    """Bits flipped, bytes dropped, doubled and exchanged, or the end of another one."""
    mutated = bytearray(encoded)
    for _ in range(draw.randrange(1, 4)):
        place = draw.randrange(len(mutated) or 1)
        match draw.randrange(5):
            case 0 if mutated:
                mutated[place] ^= 1 << draw.randrange(8)
            case 1:
                del mutated[place : place + draw.randrange(1, 9)]
            case 2:
                mutated[place:place] = mutated[: draw.randrange(8)]
            case 3:
                mutated[place : place + 1] = draw.randbytes(1)
            case _:
                mutated[place:] = draw.choice(others)[place:]
    return bytes(mutated)


def plain_id(value: object) -> str:
    """Returns the beginning of the value's representation, without backslashes."""
    return ascii(value[:20] if isinstance(value, bytes) else value)[:200].replace("\\", "/")
