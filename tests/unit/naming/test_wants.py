# SPDX-License-Identifier: Apache-2.0
"""naming/wants.py: what engines of one device tell each other, and that nothing odd in its folder counts."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path

import pytest

from kvcached_nixl.naming.wants import FRESH_SECONDS, OLD_SECONDS, Wants


def folder(root: Path) -> Path:
    return root / f"kvcached-nixl-wants-{os.geteuid()}"


def test_engines_of_one_device_hear_each_other(tmp_path: Path) -> None:
    one, two = (Wants(tmp_path, name, "gpu 0") for name in ("one", "two"))
    other = Wants(tmp_path, "other", "gpu 1")
    one.say(0)
    assert not folder(tmp_path).exists() and two.of_others() == 0
    one.say(100)
    other.say(7)
    assert (one.of_others(), two.of_others()) == (0, 100)
    two.say(20)
    assert Wants(tmp_path, "three", "gpu 0").of_others() == 120
    one.say(0)
    assert two.of_others() == 0 and folder(tmp_path).stat().st_mode & 0o777 == 0o700


def test_what_is_not_said_again_does_not_count_and_is_removed_in_the_end(tmp_path: Path) -> None:
    """Its engine was killed."""
    one, two = (Wants(tmp_path, name, "d") for name in ("one", "two"))
    one.say(5)
    path = folder(tmp_path) / "one"
    for seconds, is_there in ((FRESH_SECONDS + 1, True), (OLD_SECONDS + 1, False)):
        os.utime(path, (time.time() - seconds,) * 2)
        assert two.of_others() == 0 and path.exists() == is_there


@pytest.mark.parametrize(
    "said",
    ["", "no JSON", "[]", "5", *map(json.dumps, ({"device": "d"}, {"device": "d", "bytes": -1}, {"bytes": 5}))]
    + ['{"device": "d", "bytes": true}', '{"device": "d", "bytes": "5"}', " " * 5000 + '{"device": "d", "bytes": 5}'],
)
def test_odd_files_say_nothing(tmp_path: Path, said: str) -> None:
    one = Wants(tmp_path, "one", "d")
    one.say(1)
    (folder(tmp_path) / "odd").write_text(said)
    (folder(tmp_path) / "link").symlink_to(folder(tmp_path) / "one")
    (folder(tmp_path) / "folder").mkdir()
    assert one.of_others() == 0


@pytest.mark.parametrize("is_link", [False, True])
def test_a_folder_that_cannot_be_used_is_left_alone(tmp_path: Path, is_link: bool) -> None:
    if is_link:
        (tmp_path / "elsewhere").mkdir()
        folder(tmp_path).symlink_to(tmp_path / "elsewhere")
    else:
        folder(tmp_path).write_text("")
    one = Wants(tmp_path, "one", "d")
    one.say(5)
    one.say(0)
    assert one.of_others() == 0 and (not is_link or not [*(tmp_path / "elsewhere").iterdir()])
