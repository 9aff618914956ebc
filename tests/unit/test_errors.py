# SPDX-License-Identifier: Apache-2.0
"""`kvcached_nixl.errors`."""

from __future__ import annotations

import pickle

import pytest

from kvcached_nixl.errors import ContractChanged, Refused, StartRefused

SENTENCES = {"found": "3 blocks", "expected": "4 blocks", "consequence": "One is lost.", "remedy": "Add one."}


def subclasses(cls: type[Refused]) -> list[type[Refused]]:
    return [cls, *(found for child in cls.__subclasses__() for found in subclasses(child))]


@pytest.mark.parametrize("cls", subclasses(Refused))
def test_every_error_says_four_sentences_and_survives_pickling(cls: type[Refused]) -> None:
    """vLLM sends errors between its processes; an error that cannot be unpickled hides the reason."""
    error = pickle.loads(pickle.dumps(cls(**SENTENCES)))
    assert type(error) is cls
    assert [getattr(error, name) for name in SENTENCES] == list(SENTENCES.values())
    assert all(sentence in str(error) and sentence in error.line for sentence in SENTENCES.values())


@pytest.mark.parametrize("left_out", SENTENCES)
def test_an_error_with_a_missing_sentence_cannot_be_made(left_out: str) -> None:
    """Found, expected, consequence and remedy are all required."""
    with pytest.raises(TypeError, match=left_out):
        Refused(**{name: text for name, text in SENTENCES.items() if name != left_out})


def test_a_start_is_refused_with_every_cause_by_name() -> None:
    """Nobody repairs one cause to meet the next."""
    causes = [("vLLM version", Refused(**SENTENCES)), ("worker.load", ContractChanged(**{**SENTENCES, "found": "x"}))]
    text = str(StartRefused.of("NixlConnector", causes))
    assert "[vLLM version] 3 blocks" in text
    assert "[worker.load] x" in text
    assert "NixlConnector is not constructed" in text
    assert "[vLLM version] 3 blocks" in str(StartRefused.of("NixlConnector", causes[:1]))
