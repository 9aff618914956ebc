# SPDX-License-Identifier: Apache-2.0
"""128-bit checksums of a model's configuration, code and processor settings, without names and locations."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

__all__ = ["NAMES", "checksum_of", "code_checksum"]

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
        # How attention is computed, which the handshake compares by vLLM's own backend names.
        "_attn_implementation",
        "_attn_implementation_autoset",
        "_attn_implementation_internal",
    }
)
"""Fields, at any depth, that only name something. They are left out, so that a renamed model compares equal."""


_PROCESSORS = ("preprocessor_config.json", "video_preprocessor_config.json", "processor_config.json")


def checksum_of(values: Mapping[str, Any]) -> str:
    """32 hexadecimal digits of plain values, as ``PretrainedConfig.to_dict`` returns them, in any key order."""
    text = json.dumps(_without_names(values), sort_keys=True, separators=(",", ":"), default=_plain)
    return hashlib.blake2b(text.encode(errors="surrogatepass"), digest_size=16).hexdigest()


def code_checksum(folder: Path) -> str:
    """Checksum of the Python files in a model's folder, which ``--trust-remote-code`` runs; "" if there are none.

    Raises:
        OSError: a file cannot be read.
    """
    files = sorted(folder.glob("*.py"))
    if not files:
        return ""
    hasher = hashlib.blake2b(digest_size=16)
    for path in files:
        hasher.update(hashlib.blake2b(path.name.encode()).digest() + hashlib.blake2b(path.read_bytes()).digest())
    return hasher.hexdigest()


def processor_checksum(folder: Path) -> str:
    """Checksum of a model's settings for processing images, sounds, ...; "" if it has none.

    Class names and the chat template are left out: the tokens of the prompt are compared instead.

    Raises:
        OSError, ValueError: a file cannot be read.
    """
    kept = {}
    for path in [path for name in _PROCESSORS if (path := folder / name).exists()]:
        found = json.loads(path.read_bytes())
        if not isinstance(found, dict):
            raise ValueError(f"{path.name} holds a {type(found).__name__}; expected a JSON object")
        kept[path.name] = {key: one for key, one in found.items() if not _names_code(key)}
    return checksum_of(kept) if kept else ""


def _names_code(key: str) -> bool:
    return key in ("chat_template", "processor_class", "auto_map") or key.endswith("_processor_type")


def _without_names(value: Any) -> Any:
    if isinstance(value, Mapping):
        # Keys may be numbers (labels). Mixed keys can be sorted only as strings.
        return {str(key): _without_names(one) for key, one in value.items() if key not in NAMES}
    if isinstance(value, (list, tuple)):
        return [_without_names(one) for one in value]
    if isinstance(value, (set, frozenset)):
        return sorted(json.dumps(_without_names(one), sort_keys=True, default=_plain) for one in value)
    return value


def _plain(value: Any) -> str:
    # A repr that contains an address differs between two processes.
    text = str(value)
    return type(value).__qualname__ if " at 0x" in text else text
