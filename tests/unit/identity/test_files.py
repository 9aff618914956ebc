# SPDX-License-Identifier: Apache-2.0
"""Identity of weight files: equal by content, different for any change, cheap for the largest."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Mapping
from pathlib import Path

import pytest

from kvcached_nixl.identity import files
from kvcached_nixl.identity.files import (
    PIECE_BYTES,
    checksum,
    checksum_of,
    checksums,
    processor_checksum,
    processor_code,
    settings_of,
    signature,
)

Tensors = Mapping[str, bytes]


def safetensors(path: Path, tensors: Tensors, metadata: Mapping[str, str] | None = None) -> Path:
    header: dict[str, object] = {} if metadata is None else {"__metadata__": dict(metadata)}
    begin = 0
    for name, data in tensors.items():
        header[name] = {"dtype": "U8", "shape": [len(data)], "data_offsets": [begin, begin + len(data)]}
        begin += len(data)
    text = json.dumps(header).encode()
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(len(text).to_bytes(8, "little") + text + b"".join(tensors.values()))
    return path


WEIGHTS = {"a": b"1" * 1000, "b": bytes(range(256)) * 40, "c": b""}


def test_it_is_the_same_wherever_it_lies_and_however_it_is_split(tmp_path: Path) -> None:
    whole = safetensors(tmp_path / "here" / "model.safetensors", WEIGHTS)
    moved = safetensors(tmp_path / "there" / "other-name.safetensors", WEIGHTS, {"format": "pt"})
    turned = safetensors(tmp_path / "turned.safetensors", dict(reversed(WEIGHTS.items())))
    split = [safetensors(tmp_path / f"{name}.safetensors", {name: data}) for name, data in WEIGHTS.items()]
    found = {checksum(one) for one in ([whole], [moved], [turned], split, split[::-1])}
    assert len(found) == 1


@pytest.mark.parametrize("whole_bytes", [files.WHOLE_BYTES, 0], ids=["whole", "sampled"])
def test_it_is_another_one_for_other_bytes_names_or_shapes(tmp_path: Path, whole_bytes: int) -> None:
    others: list[Tensors] = [
        WEIGHTS,
        WEIGHTS | {"a": b"1" * 999 + b"2"},
        WEIGHTS | {"a": b"1" * 1001},
        {"d" if name == "a" else name: data for name, data in WEIGHTS.items()},
        {name: data for name, data in WEIGHTS.items() if name != "c"},
    ]
    paths = [safetensors(tmp_path / f"{at}.safetensors", one) for at, one in enumerate(others)]
    assert len({checksum([path], whole_bytes=whole_bytes) for path in paths}) == len(others)


def test_files_of_another_kind_are_taken_as_they_are(tmp_path: Path) -> None:
    contents = [b"x" * 100, b"x" * 99 + b"y", b"x" * 101, b"\xff" * 8 + b"{}"]
    paths = [tmp_path / f"{at}.bin" for at in range(len(contents))]
    broken = [tmp_path / f"{at}.safetensors" for at in range(len(contents))]
    for at, content in enumerate(contents):
        paths[at].write_bytes(content)
        broken[at].write_bytes(content)
    assert len({checksum([path]) for path in paths}) == len(contents)
    assert [checksum([path]) for path in broken] == [checksum([path]) for path in paths], "no safetensors"


def test_the_largest_checkpoint_takes_no_second(tmp_path: Path) -> None:
    """96 GiB in 48 files that take no room on the disk; what is read of them is counted."""
    paths = []
    for at in range(48):
        header = {
            f"layer.{at}.{number}": {
                "dtype": "U8",
                "shape": [1 << 25],
                "data_offsets": [number << 25, (number + 1) << 25],
            }
            for number in range(64)
        }
        text = json.dumps(header).encode()
        path = tmp_path / f"{at}.safetensors"
        with path.open("wb") as file:
            file.write(len(text).to_bytes(8, "little") + text)
            file.truncate(8 + len(text) + (64 << 25))
        paths.append(path)
    begun = time.perf_counter()
    before = checksum(paths)
    seconds = time.perf_counter() - begun
    # The last byte of one tensor among 3,072.
    with paths[17].open("r+b") as file:
        file.seek(-1, 2)
        file.write(b"!")
    assert checksum(paths) != before
    assert seconds < 5, "a second on a disk of one's own; this machine may have others on it"


def test_what_is_read_is_bounded_and_every_kind_of_tensor_is_among_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ninety experts, and three tensors that are not experts: each of the latter is read."""
    monkeypatch.setattr(files, "PIECES", 12)
    names = [f"layers.{at // 30}.experts.{at % 30}.weight" for at in range(90)]
    names += [f"layers.{at}.norm.weight" for at in range(3)]
    tensors = {name: bytes([at]) * (3 * PIECE_BYTES) for at, name in enumerate(names)}
    path = safetensors(tmp_path / "0.safetensors", tensors)
    reads: list[int] = []
    pread = os.pread
    monkeypatch.setattr(os, "pread", lambda *one: reads.append(1) or pread(*one))
    before = checksum([path], whole_bytes=0)
    assert len(reads) == 12
    split = [safetensors(tmp_path / f"s{at}.safetensors", dict([one])) for at, one in enumerate(tensors.items())]
    assert checksum(split, whole_bytes=0) == before
    for name in names[90:]:
        changed = safetensors(tmp_path / "1.safetensors", tensors | {name: b"\xff" * (3 * PIECE_BYTES)})
        assert checksum([changed], whole_bytes=0) != before, name
    renamed = {name.replace("experts.29", "experts.30"): one for name, one in tensors.items()}
    assert checksum([safetensors(tmp_path / "2.safetensors", renamed)], whole_bytes=0) != before


def test_each_file_has_a_checksum_of_its_own(tmp_path: Path) -> None:
    paths = [safetensors(tmp_path / f"{name}.safetensors", {name: data}) for name, data in WEIGHTS.items()]
    before = dict(checksums(paths).each)
    safetensors(paths[0], {"a": b"2" * 1000})
    after = dict(checksums(paths).each)
    assert [name for name in before if before[name] != after[name]] == ["a.safetensors"]


def test_a_file_that_is_gone_is_an_error(tmp_path: Path) -> None:
    for ask in (checksum, signature):
        with pytest.raises(OSError, match="gone"):
            ask([tmp_path / "gone.bin"])


def test_a_signature_follows_links_and_is_another_one_for_another_file(tmp_path: Path) -> None:
    first, second, link = tmp_path / "first.bin", tmp_path / "second.bin", tmp_path / "link.bin"
    first.write_bytes(b"1")
    second.write_bytes(b"1")
    link.symlink_to(first)
    before = signature([link])
    assert before == signature([first])
    link.unlink()
    link.symlink_to(second)
    assert signature([link]) != before


# ------------------------------------------------------------------------------------------------------- configuration


def test_how_media_are_prepared_is_known_by_its_content(tmp_path: Path) -> None:
    """Other means and deviations make other images of as many tokens."""
    found = []
    for name, mean in (("a", 0.5), ("b", 0.5), ("c", 0.6)):
        folder = tmp_path / name
        folder.mkdir()
        assert processor_checksum(folder) == ""
        settings = {"image_mean": [mean], "_name_or_path": str(folder)}
        (folder / "preprocessor_config.json").write_text(json.dumps(settings))
        found.append(processor_checksum(folder))
    assert found[0] == found[1] != found[2]
    for text in ("{", "[1]"):
        (tmp_path / "a" / "preprocessor_config.json").write_text(text)
        with pytest.raises(ValueError):
            processor_checksum(tmp_path / "a")


def test_a_configuration_is_what_it_says_without_what_it_is_called() -> None:
    plain = {
        "rope_theta": 1e4,
        "text_config": {"layers": [1, 2], "_name_or_path": "/a"},
        "labels": {0: "x"},
        "s": {2, 1},
    }
    moved = {"s": {1, 2}, "labels": {0: "x"}, "_name_or_path": "b", "transformers_version": "9"}
    moved |= {"text_config": {"_name_or_path": "/b", "layers": (1, 2)}, "rope_theta": 1e4}
    assert checksum_of(plain) == checksum_of(moved)
    assert checksum_of(plain) != checksum_of(plain | {"rope_theta": 2e4})
    assert checksum_of(plain) != checksum_of(plain | {"text_config": {"layers": [2, 1]}})


def test_what_shows_an_address_is_equal_in_every_process() -> None:
    assert checksum_of({"a": object()}) == checksum_of({"a": object()})


def test_code_that_prepares_media_counts_and_other_code_does_not(tmp_path: Path) -> None:
    """A hub's download has every file of a model, vLLM's own only those that it uses."""
    assert processor_code(tmp_path) == ""
    (tmp_path / "modeling_x.py").write_text("x = 1")
    (tmp_path / "config.json").write_text(json.dumps({"auto_map": {"AutoModel": "modeling_x.X"}}))
    assert processor_code(tmp_path) == ""
    maps = {"AutoProcessor": "me/it--processing_x.X", "AutoImageProcessor": ["processing_y.Y", None]}
    (tmp_path / "preprocessor_config.json").write_text(json.dumps({"auto_map": maps}))
    (tmp_path / "processing_x.py").write_text("from .helper import x")
    before = processor_code(tmp_path)
    (tmp_path / "helper.py").write_text("x = 1")
    (tmp_path / "unused.py").write_text("x = 1")
    found = processor_code(tmp_path)
    assert len({"", before, found}) == 3
    (tmp_path / "helper.py").write_text("x = 2")
    assert processor_code(tmp_path) not in ("", before, found)


def test_settings_are_compared_one_by_one_without_limits() -> None:
    """MiniMax-M2 writes ``--max-model-len`` into its configuration."""
    values = {"rope": {"theta": 1e4, "kind": "yarn"}, "max_model_len": 4096, "layers": [1, 2], "_name_or_path": "x"}
    found = settings_of(values)
    assert found["rope.theta"] == "10000.0" and found["rope.kind"] == "yarn"
    assert set(found) == {"rope.theta", "rope.kind", "layers"}
    assert settings_of(values | {"layers": [2, 1]})["layers"] != found["layers"]
    labels = settings_of({"labels": {number: str(number) for number in range(1000)}, "a b": "c; d, [e]"})
    assert all(len(text) <= 32 for text in labels.values()) and set(labels) == {"labels", "a b"}
