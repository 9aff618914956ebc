# SPDX-License-Identifier: Apache-2.0
"""128-bit checksums of weight files, independent of their folder, their names and how a checkpoint is split into files.

Safetensors files are hashed tensor by tensor, with each tensor's name, type and shape, so a checkpoint that was split
into other files has the same checksum. Up to ``WHOLE_BYTES`` everything is read. Beyond that, pieces of each tensor are
read, at offsets that follow from its size: tens of MiB of a checkpoint of hundreds of GB. A file of another kind is
hashed as one sequence of bytes.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

import msgspec
import xxhash

__all__ = ["WHOLE_BYTES", "Signature", "checksum", "signature"]

WHOLE_BYTES = 256 << 20
"""Files whose total size is larger are sampled."""
PIECES, PIECE_BYTES = 8192, 4096
"""How much is sampled: about this many pieces in total, at least one per tensor, and the size of a piece."""
_READ_BYTES = 8 << 20
_READERS = 8
_LONGEST_HEADER_BYTES = 1 << 30

Signature = tuple[tuple[str, int, int, int], ...]
"""(resolved path, size, modification time in ns, inode) of each file: equal as long as no file was replaced."""


class _Span(NamedTuple):
    """The bytes of one tensor, or of a whole file. ``key``: the tensor's name, type and shape; empty for a file."""

    key: bytes
    path: Path
    begin: int
    length: int


def signature(paths: Sequence[Path]) -> Signature:
    """The `Signature` of these files. Raises OSError: a file does not exist."""
    found = []
    for path in paths:
        resolved = path.resolve(strict=True)
        status = resolved.stat()
        found.append((str(resolved), status.st_size, status.st_mtime_ns, status.st_ino))
    return tuple(sorted(found))


def checksum(paths: Sequence[Path], *, whole_bytes: int = WHOLE_BYTES) -> str:
    """32 hexadecimal digits over the content of the files.

    Raises:
        OSError: a file cannot be read.
    """
    spans = [span for path in paths for span in _spans(path)]
    pieces = 0 if sum(span.length for span in spans) <= whole_bytes else max(1, PIECES // max(1, len(spans)))
    lots = [spans[place::_READERS] for place in range(_READERS)]
    with ThreadPoolExecutor(_READERS, "kvcached-nixl-checksum") as readers:
        found = [one for lot in readers.map(lambda lot: _digests(lot, pieces), lots) for one in lot]
    hasher = hashlib.blake2b(digest_size=16)
    for one in sorted(found):
        hasher.update(one)
    return hasher.hexdigest()


def _spans(path: Path) -> Iterator[_Span]:
    size = path.stat().st_size
    tensors = _tensors(path, size) if path.suffix == ".safetensors" else None
    if tensors is None:
        yield _Span(b"", path, 0, size)
        return
    yield from tensors


class _Tensor(msgspec.Struct):
    dtype: str
    shape: list[int]
    data_offsets: tuple[int, int]


_header = msgspec.json.Decoder(dict[str, msgspec.Raw])
_tensor = msgspec.json.Decoder(_Tensor)


def _tensors(path: Path, size: int) -> list[_Span] | None:
    """The tensors of a safetensors file; None if it is not a safetensors file."""
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        if not 0 < length <= min(size, _LONGEST_HEADER_BYTES):
            return None
        raw = file.read(length)
    try:
        entries = {name: _tensor.decode(raw) for name, raw in _header.decode(raw).items() if name != "__metadata__"}
    except (msgspec.MsgspecError, UnicodeError, RecursionError):
        return None
    first = 8 + length
    found = []
    for name, one in entries.items():
        begin, end = one.data_offsets
        if not 0 <= begin <= end <= size - first:
            return None
        key = msgspec.msgpack.encode((name, one.dtype, one.shape))
        found.append(_Span(key, path, first + begin, end - begin))
    return found


def _digests(spans: Sequence[_Span], pieces: int) -> list[bytes]:
    """One digest per span, in no particular order. ``pieces``: how many to read of each span; 0 for all of it."""
    found, opened, descriptor = [], None, -1
    try:
        for span in spans:
            if span.path != opened:
                if descriptor >= 0:
                    os.close(descriptor)
                descriptor, opened = os.open(span.path, os.O_RDONLY | os.O_CLOEXEC), span.path
            hasher = xxhash.xxh3_128(len(span.key).to_bytes(8, "little") + span.key + span.length.to_bytes(8, "little"))
            for begin, length in _ranges(span.length, pieces):
                data = os.pread(descriptor, length, span.begin + begin)
                if len(data) != length:
                    raise OSError(f"{span.path} became shorter while it was read")
                hasher.update(data)
            found.append(hasher.digest())
    finally:
        if descriptor >= 0:
            os.close(descriptor)
    return found


def _ranges(length: int, pieces: int) -> Iterator[tuple[int, int]]:
    """(offset, size) of each range to read of ``length`` bytes. Unless ``pieces`` is 1, the first and the last byte
    are among them.
    """
    if not pieces or length <= pieces * PIECE_BYTES:
        for begin in range(0, length, _READ_BYTES):
            yield begin, min(_READ_BYTES, length - begin)
        return
    last = length - PIECE_BYTES
    for number in range(pieces):
        # A single piece is taken from the middle: two different tensors are most likely to be equal at their ends.
        yield (last // 2 if pieces == 1 else last * number // (pieces - 1)), PIECE_BYTES
