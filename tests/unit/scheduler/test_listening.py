# SPDX-License-Identifier: Apache-2.0
"""scheduler/listening.py: what ends vLLM's listener, and what must not."""

from __future__ import annotations

import logging

import msgspec
import pytest

from kvcached_nixl.scheduler.listening import Answers, keep_listening
from kvcached_nixl.settings import SERVER_LOGGER


@pytest.mark.parametrize("rank", [2, (0, 2), (1, 0), "0", None])
def test_a_rank_that_is_not_here_is_answered_in_words(rank: object) -> None:
    answers = Answers({(0, 0): b"zero", (0, 1): b"one"})
    assert answers[0, 1] == b"one"
    said = msgspec.msgpack.decode(answers[rank])
    assert str(rank) in said["compatibility_hash"] and "(0, 1)" in said["compatibility_hash"]
    assert said["agent_metadata_bytes"] == b"" and len(answers) == 2


@pytest.mark.parametrize("cause", [msgspec.DecodeError("x"), ValueError("x"), TypeError("x"), KeyError("x")])
def test_it_listens_again_after_a_message_that_cannot_be_read(
    cause: Exception, caplog: pytest.LogCaptureFixture
) -> None:
    ends: list[Exception | None] = [cause, cause, None]

    def listen() -> None:
        if (end := ends.pop(0)) is not None:
            raise end

    with caplog.at_level(logging.WARNING, SERVER_LOGGER):
        keep_listening(listen, lambda: True)
    assert ends == [] and len(caplog.messages) == 2


@pytest.mark.parametrize(("cause", "is_listening"), [(ValueError("x"), False), (OSError("in use"), True)])
def test_what_is_no_messages_doing_is_raised(cause: Exception, is_listening: bool) -> None:
    def listen() -> None:
        raise cause

    with pytest.raises(type(cause)):
        keep_listening(listen, lambda: is_listening)
