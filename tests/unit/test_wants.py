# SPDX-License-Identifier: Apache-2.0
"""wants.py: what engines of one device tell each other, and that nothing odd in its folder counts."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path

import pytest

from kvcached_nixl import wants as module
from kvcached_nixl.wants import AGAIN_SECONDS, FRESH_SECONDS, OLD_SECONDS, Want, Wants

NONE = Want(0, False)


def folder(root: Path) -> Path:
    return root / f"kvcached-nixl-wants-{os.geteuid()}"


def test_engines_of_one_device_hear_each_other(tmp_path: Path) -> None:
    one, two = (Wants(tmp_path, name, "gpu 0") for name in ("one", "two"))
    other = Wants(tmp_path, "other", "gpu 1")
    one.say(Want(0, False))
    assert not folder(tmp_path).exists() and two.of_others() == NONE
    one.say(Want(100, False))
    other.say(Want(7, True))
    assert (one.of_others(), two.of_others()) == (NONE, Want(100, False))
    two.say(Want(20, True))
    assert Wants(tmp_path, "three", "gpu 0").of_others() == Want(120, True)
    one.say(Want(0, False))
    assert two.of_others() == NONE and folder(tmp_path).stat().st_mode & 0o777 == 0o700


def test_what_is_not_said_again_does_not_count_and_is_removed_in_the_end(tmp_path: Path) -> None:
    """Its engine was killed."""
    one, two = (Wants(tmp_path, name, "d") for name in ("one", "two"))
    one.say(Want(5, False))
    path = folder(tmp_path) / "one"
    for seconds, is_there in ((FRESH_SECONDS + 1, True), (OLD_SECONDS + 1, False)):
        os.utime(path, (time.time() - seconds,) * 2)
        assert two.of_others() == NONE and path.exists() == is_there


@pytest.mark.parametrize(
    "said",
    ["", "no JSON", "[]", "5", *map(json.dumps, ({"device": "d"}, {"device": "d", "bytes": -1}, {"bytes": 5}))]
    + ['{"device": "d", "bytes": true}', '{"device": "d", "bytes": "5"}', " " * 5000 + '{"device": "d", "bytes": 5}'],
)
def test_odd_files_say_nothing(tmp_path: Path, said: str) -> None:
    one = Wants(tmp_path, "one", "d")
    one.say(Want(1, False))
    (folder(tmp_path) / "odd").write_text(said)
    (folder(tmp_path) / "link").symlink_to(folder(tmp_path) / "one")
    (folder(tmp_path) / "folder").mkdir()
    assert one.of_others() == NONE


@pytest.mark.parametrize("is_link", [False, True])
def test_a_folder_that_cannot_be_used_is_left_alone(tmp_path: Path, is_link: bool) -> None:
    if is_link:
        (tmp_path / "elsewhere").mkdir()
        folder(tmp_path).symlink_to(tmp_path / "elsewhere")
    else:
        folder(tmp_path).write_text("")
    one = Wants(tmp_path, "one", "d")
    one.say(Want(5, False))
    one.say(Want(0, False))
    assert one.of_others() == NONE and (not is_link or not [*(tmp_path / "elsewhere").iterdir()])


def test_it_is_written_when_it_is_new_or_was_said_a_while_ago(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    now, one = [100.0], Wants(tmp_path, "one", "d")
    monkeypatch.setattr(module.time, "monotonic", lambda: now[0])
    path = folder(tmp_path) / "one"

    def written(want: Want) -> bool:
        before = path.stat().st_ino if path.exists() else 0
        one.say(want)
        return path.stat().st_ino != before

    assert [written(one) for one in (Want(5, False), Want(5, False), Want(5, True), Want(6, True))] == [
        *(True, False, True, True)
    ]
    now[0] += AGAIN_SECONDS
    assert written(Want(6, True)) and not written(Want(6, True))


def test_what_was_served_counts_again_when_it_is_said_again(tmp_path: Path) -> None:
    one, two = (Wants(tmp_path, name, "d") for name in ("one", "two"))
    one.say(Want(5, True))
    assert two.of_others() == Want(5, True)
    two.served()
    assert two.of_others() == NONE
    os.utime(folder(tmp_path) / "one")
    assert two.of_others() == Want(5, True)
