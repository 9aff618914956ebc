# SPDX-License-Identifier: Apache-2.0
"""128-bit checksums of a model's configuration, code and processor settings, without names and locations."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

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

_LIMITS = frozenset({"max_model_len", "max_num_seqs", "max_num_batched_tokens"})
"""Limits of an engine, which some models copy into their configuration (MiniMax-M2). They change no byte of KV."""
_PROCESSORS = ("preprocessor_config.json", "video_preprocessor_config.json", "processor_config.json")
_MAPS = ("config.json", "tokenizer_config.json")
_PREPARES = frozenset({"AutoProcessor", "AutoImageProcessor", "AutoVideoProcessor", "AutoFeatureExtractor"})
_RELATIVE_IMPORT = re.compile(rb"^\s*from\s+\.(\w+)\s+import", re.M)
_MOST_NAMED = 64
"""Larger groups of settings (names of labels) count as one."""
_SHORT = re.compile(r"[\w.+-]{1,32}")


def checksum_of(values: Mapping[str, Any]) -> str:
    """32 hexadecimal digits of plain values, as ``PretrainedConfig.to_dict`` returns them, in any key order."""
    text = json.dumps(_without_names(values), sort_keys=True, separators=(",", ":"), default=_plain)
    return hashlib.blake2b(text.encode(errors="surrogatepass"), digest_size=16).hexdigest()


def settings_of(values: Mapping[str, Any]) -> dict[str, str]:
    """The same values one by one, as short texts by name ("text_config.rope_theta"): what differs has a name."""
    found: dict[str, str] = {}
    for key, value in _without_names(values).items():
        if isinstance(value, dict) and 0 < len(value) <= _MOST_NAMED:
            found |= {f"{key}.{name}": text for name, text in settings_of(value).items()}
        else:
            text = str(value)
            found[key] = text if _SHORT.fullmatch(text) else checksum_of({"value": value})[:16]
    return found


def processor_code(folder: Path) -> str:
    """Checksum of the Python files in a model's folder that prepare media (``--trust-remote-code``); "" if none does.

    Raises:
        OSError, ValueError: a file cannot be read.
    """
    waiting = set()
    for path in [path for name in (*_PROCESSORS, *_MAPS) if (path := folder / name).exists()]:
        for kind, classes in dict(json.loads(path.read_bytes()).get("auto_map") or {}).items():
            if kind in _PREPARES:
                named = [classes] if isinstance(classes, str) else [one for one in classes if one]
                waiting |= {one.rpartition("--")[2].partition(".")[0] for one in named}
    read: dict[str, bytes] = {}
    while waiting:
        name = waiting.pop()
        path = folder / f"{name}.py"
        if name not in read and path.exists():
            read[name] = path.read_bytes()
            waiting |= {one.decode() for one in _RELATIVE_IMPORT.findall(read[name])}
    return checksum_of({name: hashlib.blake2b(code).hexdigest() for name, code in read.items()}) if read else ""


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
        return {str(key): _without_names(one) for key, one in value.items() if key not in NAMES and key not in _LIMITS}
    if isinstance(value, (list, tuple)):
        return [_without_names(one) for one in value]
    if isinstance(value, (set, frozenset)):
        return sorted(json.dumps(_without_names(one), sort_keys=True, default=_plain) for one in value)
    return value


def _plain(value: Any) -> str:
    # A repr that contains an address differs between two processes.
    text = str(value)
    return type(value).__qualname__ if " at 0x" in text else text
