# SPDX-License-Identifier: Apache-2.0
"""Options that several experiments share."""

from __future__ import annotations

import argparse

import pytest

from experiments.common.command_line import add_rounds


@pytest.mark.parametrize("text", ["0", "-1", "1.5", "", "x", "²"])
def test_a_number_of_rounds_that_would_measure_nothing_is_refused(
    text: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Results would be replaced by none."""
    parser = argparse.ArgumentParser()
    add_rounds(parser, 2, "how often")
    with pytest.raises(SystemExit):
        parser.parse_args([f"--rounds={text}"])
    assert f"found {text!r}, expected a number of at least 1" in capsys.readouterr().err
    assert parser.parse_args(["--rounds", "3"]).rounds == 3 and parser.parse_args([]).rounds == 2
