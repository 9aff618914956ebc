# SPDX-License-Identifier: Apache-2.0
"""Reads what matters here from the command line of a server, as vLLM's own parser would, without importing vLLM.

Sources: ``vllm/utils/argparse_utils.py``. ``tests/contract/test_deploy.py`` compares this module with that parser.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from kvcached_nixl.errors import SettingsError

__all__ = ["SHORT", "TRANSFER_FLAG", "ServeCommand", "transfer_config"]

TRANSFER_FLAG = "--kv-transfer-config"
SHORT: Mapping[str, str] = MappingProxyType(
    {
        "-dp": "--data-parallel-size",
        "-dpe": "--data-parallel-external-lb",
        "-dpl": "--data-parallel-size-local",
        "-dpn": "--data-parallel-rank",
        "-dpr": "--data-parallel-start-rank",
        "-n": "--nnodes",
        "-pp": "--pipeline-parallel-size",
        "-r": "--node-rank",
        "-tp": "--tensor-parallel-size",
    }
)
"""vLLM's short names of the flags that the checks read."""
_OF_NAME = re.compile(r"(?<=^--)[^.=]*")


def transfer_config(text: str) -> Mapping[str, Any]:
    """Parse the value of ``--kv-transfer-config``.

    Raises:
        SettingsError: it is no JSON object.
    """
    try:
        found = json.loads(text)
    except ValueError as error:
        raise _unreadable(text, str(error)) from error
    if not isinstance(found, dict):
        raise _unreadable(text, "no JSON object")
    return found


@dataclass(frozen=True)
class ServeCommand:
    """The words of a command line: ``vllm serve``, or of a program that passes vLLM's flags on."""

    words: tuple[str, ...]

    def value(self, flag: str) -> str | None:
        """The value of ``--flag value`` or ``--flag=value``; the last one counts. None without the flag."""
        return next((value for name, value in reversed([*self._flags()]) if name == flag), None)

    @property
    def transfer(self) -> Mapping[str, Any] | None:
        """``--kv-transfer-config`` with what ``--kv-transfer-config.KEY VALUE`` adds; None without either.

        Raises:
            SettingsError: it cannot be read.
        """
        text = self.value(TRANSFER_FLAG)
        found: dict[str, Any] = {}
        for name, value in self._flags():
            if name.startswith(f"{TRANSFER_FLAG}."):
                _set(found, name.split(".")[1:], value)
        # vLLM's parser appends the dotted flags as one JSON object, and its last value counts.
        if found:
            return found
        return None if text is None else transfer_config(text)

    def _flags(self) -> Iterator[tuple[str, str]]:
        """(name with dashes, value); a flag without a value has the word that follows it, or nothing."""
        for place, word in enumerate(self.words):
            name, equals, value = word.partition("=")
            if not word.startswith("--"):
                if name[:2] in SHORT and name[2:].isdecimal():
                    # "-n2": so only with names of one letter.
                    name, equals, value = name[:2], "=", name[2:]
                if name not in SHORT:
                    continue
            following = self.words[place + 1] if place + 1 < len(self.words) else ""
            long = _OF_NAME.sub(lambda one: one[0].replace("_", "-"), SHORT.get(name, name))
            yield long, value if equals else following


def _set(found: dict[str, Any], keys: list[str], text: str) -> None:
    for key in keys[:-1]:
        found = found.setdefault(key, {})
        if not isinstance(found, dict):
            raise _unreadable(text, f"{key} is a value and an object")
    try:
        found[keys[-1]] = json.loads(text)
    except ValueError:
        found[keys[-1]] = text


def _unreadable(text: str, why: str) -> SettingsError:
    return SettingsError(
        found=f"{TRANSFER_FLAG} {text!r}: {why}",
        expected='a JSON object, such as {"kv_connector": "NixlConnector", "kv_role": "kv_producer"}',
        consequence="vLLM does not start.",
        remedy="Correct the JSON; in a shell and in YAML put it in single quotes.",
    )
