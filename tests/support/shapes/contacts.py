# SPDX-License-Identifier: Apache-2.0
"""What kvcached touches in a vLLM that is not installed, compared with `vllm.patches.windows`, as it is at start."""

from __future__ import annotations

from collections.abc import Iterable

from experiments.common.vllm_source import Source
from kvcached_nixl.vllm.patches.windows import CONTACTS, Contact
from support.shapes.reading import Reader

__all__ = ["differing"]


def differing(source: Source, contacts: Iterable[Contact] = CONTACTS) -> list[str]:
    """The contacts that are not there, or have other parameters, each with what was found."""
    reader = Reader(source)
    return [f"{contact}: {found}" for contact in contacts if (found := _difference(reader, contact))]


def _difference(reader: Reader, contact: Contact) -> str:
    owner, _, name = contact.qualname.rpartition(".")
    found = reader.resolve(contact.module, owner or name)
    if found is not None and not owner:
        module, _, name = found.partition(":")
        found = f"{module}:"
    written = None if found is None else reader.body(found).methods.get(name)
    if written is None:
        return "not there"
    given = written.partition("(")[2].removesuffix(")").split(", ")
    names = [one.lstrip("*").partition("=")[0] for one in given]
    names = [one for one in names if one not in ("", "/")]
    return "" if tuple(names) in contact.accepted else f"parameters ({', '.join(names)})"
