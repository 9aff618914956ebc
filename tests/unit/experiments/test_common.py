# SPDX-License-Identifier: Apache-2.0
"""experiments/common: device options of servers, small models, kvcached's counters, and results."""

from __future__ import annotations

import json
import struct
import subprocess
from pathlib import Path

import pytest

pytest.importorskip("rich", reason="needs an environment: bash experiments/env.sh")
pytest.importorskip("transformers", reason="comes with vLLM")

from experiments.__main__ import parse
from experiments.byte_equivalence.arms import ARMS, specs
from experiments.common import device, model, report
from experiments.common.counted import PageCount, PageWatch, count_pages, own_names
from experiments.common.model import ModelShape, make_model

RUN = Path(__file__).parents[3] / "tests" / "run.sh"
SHAPES = {name: one for name, one in vars(model).items() if isinstance(one, ModelShape)}


@pytest.fixture(params=[False, True], ids=["cpu", "gpu"])
def has_gpu(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> bool:
    monkeypatch.setattr(device, "has_gpu", lambda: request.param)
    return bool(request.param)


def test_an_arm_takes_the_path_of_its_name(has_gpu: bool, tmp_path: Path) -> None:
    """On a CPU the proof finds it out, where registrations are as the arm has them; on a GPU it is asked for."""
    for arm in (arm for arm in ARMS if arm.kvcached):
        for number, spec in enumerate(specs(arm, tmp_path, "float32", {})):
            is_decode = number >= arm.servers
            is_staged = is_decode if arm.decode else arm.is_staged and not (arm.prefill and is_decode)
            command = spec.command(8000, "e")
            config = json.loads(command[command.index("--kv-transfer-config") + 1])
            path = config["kv_connector_extra_config"].get("memory_path")
            given = device.environment(spec.environment, 1, forks=True)
            if has_gpu:
                assert path in (("device", "host") if is_staged else ("direct",)), spec.name
                assert not any("HOSTVMM" in name or "CPU" in name or "EXPERIMENT" in name for name in given)
            else:
                is_pinned = given[device.REGISTRATION] == "pinned"
                assert is_staged is (is_pinned or path in ("device", "host")), spec.name


@pytest.mark.parametrize("name", SHAPES)
def test_the_model_has_a_row_for_every_token_of_its_tokenizer(name: str, tmp_path: Path) -> None:
    """vLLM takes any id that the tokenizer has; one without a row ends the engine."""
    from transformers import AutoTokenizer

    folder = make_model(SHAPES[name], cache=tmp_path)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    assert sorted(tokenizer.get_vocab().values()) == list(range(SHAPES[name].vocabulary))
    assert tokenizer.convert_ids_to_tokens([0, 1]) == ["<s>", "</s>"]


@pytest.mark.parametrize(
    ("levels", "mapped", "unmapped", "remapped"),
    [([], 0, 0, 0), ([4], 0, 0, 0), ([0, 2, 6], 6, 0, 0), ([6, 2, 0], 0, 6, 0), ([0, 4, 2, 6], 8, 2, 4)],
)
def test_only_a_rise_after_a_fall_is_a_remap(levels: list[int], mapped: int, unmapped: int, remapped: int) -> None:
    """A pool that only grows, or only shrinks, has remapped nothing."""
    counted = count_pages([(8, level) for level in levels])
    assert (counted.mapped_bytes, counted.unmapped_bytes, counted.remapped_bytes) == (mapped, unmapped, remapped)


def test_the_account_is_read_as_kvcached_writes_it(tmp_path: Path) -> None:
    """Limit, used, reserved: mapped is used plus reserved; the same reading twice is one sample."""
    watch = PageWatch("engine", tmp_path)
    for used, reserved in ((0, 0), (4, 2), (4, 2), (1, 0)):
        (tmp_path / "engine").write_bytes(struct.pack("=qqq", 100, used, reserved))
        watch.sample()
    assert watch.count() == PageCount(3, 100, 0, 6, mapped_bytes=6, unmapped_bytes=5, remapped_bytes=0)


def test_an_engine_is_found_by_what_it_was_given(tmp_path: Path) -> None:
    """Its own name begins with that; of several each is watched by its own."""
    for name in ("kvx-dp0-1a", "kvx-dp1-1b", "kvxother-1c", "plain"):
        (tmp_path / name).write_bytes(struct.pack("=qqq", 100, 4, 2))
    assert own_names("kvx", tmp_path) == ["kvx-dp0-1a", "kvx-dp1-1b"]
    assert own_names("plain", tmp_path) == ["plain"]
    with pytest.raises(ValueError, match="Watch each of them"):
        PageWatch("kvx", tmp_path).sample()
    for name in ("kvx-dp1-1b", "kvxother", "plain"):
        assert PageWatch(name, tmp_path).mapped_bytes() == 6


@pytest.mark.parametrize(("reached", "status"), [([True, True], 0), ([True, False], 1), ([], 0)])
def test_one_missed_target_is_the_exit_status(reached: list[bool], status: int, tmp_path: Path) -> None:
    run = report.Run(parse(["dashboard", "--vllm", "1.0"]), tmp_path)
    verdicts = [report.Verdict("less than 2 s", "1 s", one) for one in reached]
    assert run.conclude([], verdicts, {"seed": 1}) == status
    found = json.loads((tmp_path / "last-1.0.json").read_text())
    assert found["targets"] == [{"target": "less than 2 s", "found": "1 s", "reached": one} for one in reached]
    assert (found["began"], found["seed"]) == (run.began, 1)


def test_a_turn_without_history_asks_for_its_number() -> None:
    found = subprocess.run(["bash", str(RUN), "--turn", "x"], capture_output=True, text=True, check=False)
    assert (found.returncode, found.stdout) == (2, "")
    assert "found x; expected a number behind --turn" in found.stderr
