# SPDX-License-Identifier: Apache-2.0
"""128-bit checksums of a model's files, whatever their names and places: its weights, its configuration, code and
processor settings.

Safetensors files are hashed tensor by tensor, with each tensor's name, type and shape, so a checkpoint that was split
into other files has the same checksum. Up to ``WHOLE_BYTES`` everything is read. Beyond that, `PIECES` pieces, whatever
the number of tensors: a file system may take 50 ms for each. A file of another kind is one sequence of bytes.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import zip_longest
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import xxhash

WHOLE_BYTES = 256 << 20
"""Files whose total size is larger are sampled."""
PIECES, PIECE_BYTES = 8192, 4096
"""How many pieces are sampled in all, and the size of one."""
_READ_BYTES = 8 << 20
_READERS = 64
_HEADER_BYTES = 256 << 10
"""What is read of a file at first: the header of most, in one read."""
_LONGEST_HEADER_BYTES = 1 << 30

Signature = tuple[tuple[str, int, int], ...]
"""(resolved path, size, modification time in ns) of each file: equal as long as no file was replaced. Some network file
systems draw inode numbers anew."""


class Checksums(NamedTuple):
    """Of the content of files.

    Attributes:
        content: of all of them, 32 hexadecimal digits.
        each: (name, 8 digits) of each file.
        tensors: names of their tensors; of a file of another kind than safetensors, its checksum.
    """

    content: str
    each: tuple[tuple[str, str], ...]
    tensors: tuple[str, ...] = ()


class _Span(NamedTuple):
    """The bytes of one tensor, or of a whole file.

    Attributes:
        name: the tensor's; "" for a file.
        key: the tensor's name, type and shape; empty for a file.
    """

    name: str
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
        found.append((str(resolved), status.st_size, status.st_mtime_ns))
    return tuple(sorted(found))


def checksum(paths: Sequence[Path], *, whole_bytes: int = WHOLE_BYTES) -> str:
    """`checksums` of all of them alone. Raises OSError: a file cannot be read."""
    return checksums(paths, whole_bytes=whole_bytes).content


def checksums(paths: Sequence[Path], *, whole_bytes: int = WHOLE_BYTES) -> Checksums:
    """Read these files with `_READERS` threads. Raises OSError: a file cannot be read."""
    with ThreadPoolExecutor(_READERS, "kvcached-nixl-checksum") as readers:
        spans = [span for found in readers.map(_spans, paths) for span in found]
        pieces = dict.fromkeys(spans, 0)
        if sum(span.length for span in spans) > whole_bytes:
            read = _chosen(spans)
            pieces = {span: PIECES // len(read) if span in read else -1 for span in spans}
        # Neighbours stay together: a thread opens few files.
        size = max(1, -(-len(spans) // (4 * _READERS)))
        lots = [spans[place : place + size] for place in range(0, len(spans), size)]
        found = [one for lot in readers.map(lambda lot: _digests(lot, pieces), lots) for one in lot]
    of_file: dict[Path, list[bytes]] = {path: [] for path in paths}
    for span, digest in zip(spans, found, strict=True):
        of_file[span.path].append(digest)
    each = tuple(sorted((path.name[:255], _joined(digests)[:8]) for path, digests in of_file.items()))
    return Checksums(
        _joined(found), each, tuple(span.name or digest.hex() for span, digest in zip(spans, found, strict=True))
    )


def _joined(digests: Sequence[bytes]) -> str:
    hasher = hashlib.blake2b(digest_size=16)
    for one in sorted(digests):
        hasher.update(one)
    return hasher.hexdigest()


def _chosen(spans: Sequence[_Span]) -> set[_Span]:
    """At most `PIECES` of them, in an order that follows from their keys: in turn one of each kind (names without their
    numbers), so that what all layers have a few of is read of each beside tens of thousands of experts."""
    kinds: dict[str, list[_Span]] = {}
    for span in sorted(spans, key=lambda span: xxhash.xxh3_64_digest(span.key)):
        kinds.setdefault(re.sub(r"[0-9]+", "#", span.name), []).append(span)
    turns = zip_longest(*(kinds[kind] for kind in sorted(kinds)))
    return set([span for turn in turns for span in turn if span is not None][:PIECES])


def _spans(path: Path) -> list[_Span]:
    size = path.stat().st_size
    tensors = _tensors(path, size) if path.suffix == ".safetensors" else None
    return [_Span("", b"", path, 0, size)] if tensors is None else tensors


class _Tensor(msgspec.Struct):
    dtype: str
    shape: list[int]
    data_offsets: tuple[int, int]


_header = msgspec.json.Decoder(dict[str, msgspec.Raw])
_tensor = msgspec.json.Decoder(_Tensor)


def _tensors(path: Path, size: int) -> list[_Span] | None:
    """The tensors of a safetensors file; None if it is not a safetensors file."""
    with path.open("rb", buffering=0) as file:
        raw = file.read(_HEADER_BYTES)
        length = int.from_bytes(raw[:8], "little")
        if not 0 < length <= min(size, _LONGEST_HEADER_BYTES):
            return None
        while len(raw) < 8 + length and (more := file.read(8 + length - len(raw))):
            raw += more
        raw = raw[8 : 8 + length]
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
        found.append(_Span(name, key, path, first + begin, end - begin))
    return found


def _digests(spans: Sequence[_Span], pieces: Mapping[_Span, int]) -> list[bytes]:
    """One digest per span, in their order. ``pieces``: how many to read of each; 0 for all of it, -1 for nothing."""
    found, opened, descriptor = [], None, -1
    try:
        for span in spans:
            hasher = xxhash.xxh3_128(len(span.key).to_bytes(8, "little") + span.key + span.length.to_bytes(8, "little"))
            for begin, length in _ranges(span.length, pieces[span]):
                if span.path != opened:
                    if descriptor >= 0:
                        os.close(descriptor)
                    descriptor, opened = os.open(span.path, os.O_RDONLY | os.O_CLOEXEC), span.path
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
    if pieces < 0:
        return
    if not pieces or length <= pieces * PIECE_BYTES:
        for begin in range(0, length, _READ_BYTES):
            yield begin, min(_READ_BYTES, length - begin)
        return
    last = length - PIECE_BYTES
    for number in range(pieces):
        # A single piece is taken from the middle: two different tensors are most likely to be equal at their ends.
        yield (last // 2 if pieces == 1 else last * number // (pieces - 1)), PIECE_BYTES


# -------------------------------------------------------------------------------------------------------- configuration


NAMES = frozenset(
    {
        "_name_or_path",
        "name_or_path",
        "base_model_name_or_path",
        "parent_library",
        "revision",
        "_commit_hash",
        "transformers_version",
        "auto_map",
        "auto_mapping",
        # Of `vllm.adapter.weights`, which compares what it holds.
        "quantization_config_file",
        # How attention is computed, which the handshake compares by vLLM's own backend names.
        "_attn_implementation",
        "_attn_implementation_autoset",
        "_attn_implementation_internal",
    }
)
"""Fields, at any depth, that only name something. They are left out, so that a renamed model compares equal."""

_LIMITS = frozenset({"max_model_len", "max_num_seqs", "max_num_batched_tokens"})
"""Limits of an engine, which some models copy into their configuration (MiniMax-M2). They change no byte of KV."""
_PROCESSORS = ("preprocessor_config.json", "video_preprocessor_config.json", "processor_config.json")
_MAPS = ("config.json", "tokenizer_config.json")
_CODE = frozenset({"chat_template", "processor_class", "auto_map"})
_PREPARES = frozenset({"AutoProcessor", "AutoImageProcessor", "AutoVideoProcessor", "AutoFeatureExtractor"})
_RELATIVE_IMPORT = re.compile(rb"^\s*from\s+\.(\w+)\s+import", re.M)
_MOST_NAMED = 64
"""Larger groups of settings (names of labels) count as one."""
_SHORT = re.compile(r"[\w.+-]{1,32}")


def checksum_of(values: Mapping[str, Any]) -> str:
    """32 hexadecimal digits of plain values, as ``PretrainedConfig.to_dict`` returns them, in any key order."""
    text = json.dumps(_without_names(values), sort_keys=True, separators=(",", ":"), default=_plain)
    return hashlib.blake2b(text.encode(errors="surrogatepass"), digest_size=16).hexdigest()


def settings_of(values: Mapping[str, Any]) -> dict[str, str]:
    """The same values one by one, as short texts by name ("text_config.rope_theta"): what differs has a name."""
    found: dict[str, str] = {}
    for key, value in _without_names(values).items():
        if isinstance(value, dict) and 0 < len(value) <= _MOST_NAMED:
            found |= {f"{key}.{name}": text for name, text in settings_of(value).items()}
        else:
            text = str(value)
            found[key] = text if _SHORT.fullmatch(text) else checksum_of({"value": value})[:16]
    return found


def processor_code(folder: Path) -> str:
    """Checksum of the Python files in a model's folder that prepare media (``--trust-remote-code``); "" if none does.
    Raises OSError, ValueError: a file cannot be read."""
    waiting = set()
    for path in [path for name in (*_PROCESSORS, *_MAPS) if (path := folder / name).exists()]:
        for kind, classes in dict(json.loads(path.read_bytes()).get("auto_map") or {}).items():
            if kind in _PREPARES:
                named = [classes] if isinstance(classes, str) else [one for one in classes if one]
                waiting |= {one.rpartition("--")[2].partition(".")[0] for one in named}
    read: dict[str, bytes] = {}
    while waiting:
        name = waiting.pop()
        path = folder / f"{name}.py"
        if name not in read and path.exists():
            read[name] = path.read_bytes()
            waiting |= {one.decode() for one in _RELATIVE_IMPORT.findall(read[name])}
    return checksum_of({name: hashlib.blake2b(code).hexdigest() for name, code in read.items()}) if read else ""


def processor_checksum(folder: Path) -> str:
    """Checksum of a model's settings for processing images, sounds, ...; "" if it has none. Class names and the chat
    template are left out: the tokens of the prompt are compared instead. Raises OSError, ValueError: a file cannot be
    read."""
    kept = {}
    for path in [path for name in _PROCESSORS if (path := folder / name).exists()]:
        found = json.loads(path.read_bytes())
        if not isinstance(found, dict):
            raise ValueError(f"{path.name} holds a {type(found).__name__}; expected a JSON object")
        kept[path.name] = {
            key: one for key, one in found.items() if key not in _CODE and not key.endswith("_processor_type")
        }
    return checksum_of(kept) if kept else ""


def _without_names(value: Any) -> Any:
    if isinstance(value, Mapping):
        # Keys may be numbers (labels). Mixed keys can be sorted only as strings.
        return {str(key): _without_names(one) for key, one in value.items() if key not in NAMES and key not in _LIMITS}
    if isinstance(value, (list, tuple)):
        return [_without_names(one) for one in value]
    if isinstance(value, (set, frozenset)):
        return sorted(json.dumps(_without_names(one), sort_keys=True, default=_plain) for one in value)
    return value


def _plain(value: Any) -> str:
    # A repr that contains an address differs between two processes.
    text = str(value)
    return type(value).__qualname__ if " at 0x" in text else text
