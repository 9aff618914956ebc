# SPDX-License-Identifier: Apache-2.0
"""What an operator can set about asking prefill, in ``kv_connector_extra_config``. ``docs/configuration.md`` says what
each key means."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from kvcached_nixl.errors import SettingsError
from kvcached_nixl.settings import bad, read_flag, read_seconds

KEY_VARIABLE = "KVCACHED_NIXL_PREFILL_API_KEY"
_ACCEPTS = "accept_kv_transfer_params"
_UNKNOWN = "It is not known which prefill servers may be asked, or how."


@dataclass(frozen=True)
class AskSettings:
    """See the module.

    Attributes:
        servers: URLs without a path; none if no prefill server is asked.
        is_required: no prompt is computed here because no prefill server answers; it waits.
        accepts_params: clients, or a router, may name a prefill server in their requests. Then clients choose whom
            decode connects to.
        api_key: "" for none.
        is_asked: others may fetch KV from this engine, too (``kv_both``).
        queue_seconds: how long a request may wait to be asked for.
        max_local_prefill_tokens: None to measure what is computed here sooner.
    """

    servers: tuple[str, ...] = ()
    is_required: bool = False
    accepts_params: bool = True
    api_key: str = field(default="", repr=False)
    is_asked: bool = False
    queue_seconds: float = math.inf
    max_local_prefill_tokens: int | None = None

    @classmethod
    def from_extra_config(cls, extra_config: Mapping[str, Any], *, is_consumer: bool, is_producer: bool) -> AskSettings:
        """The engine may fetch KV if ``is_consumer``, and offer it if ``is_producer``.

        Raises:
            SettingsError: a key has an unusable value.
        """
        said = extra_config.get("prefill")
        servers = [said] if isinstance(said, str) else said
        if "prefill" in extra_config and not (isinstance(servers, list) and servers and all(map(_is_url, servers))):
            raise bad("prefill", said, 'URLs of servers without a path, like ["http://prefill:8000"]', _UNKNOWN)
        is_required = read_flag(extra_config, "prefill_required", _UNKNOWN)
        accepts = read_flag({_ACCEPTS: not servers, **extra_config}, _ACCEPTS, _UNKNOWN)
        consequence = "Requests would be refused at once, or wait for ever."
        queue_seconds = read_seconds(extra_config, "queue_timeout", math.inf, consequence)
        most_local = extra_config.get("max_local_prefill_tokens")
        if most_local is not None and (type(most_local) is not int or most_local < 0):
            expected = "a number of tokens, 0 or more"
            raise bad("max_local_prefill_tokens", most_local, expected, "It is not known which prompts to ask for.")
        if not servers:
            return cls(accepts_params=accepts)
        if not is_consumer:
            expected = "no such key with kv_role kv_producer or pipeline stages: such an engine fetches no KV"
            raise bad("prefill", said, expected, _UNKNOWN)
        urls = tuple(dict.fromkeys(one.rstrip("/").lower() for one in servers))
        return cls(urls, is_required, accepts, _api_key(extra_config), is_producer, queue_seconds, most_local)


def _is_url(said: object) -> bool:
    if not isinstance(said, str):
        return False
    try:
        parts = urlsplit(said)
        # urlsplit drops newlines and tabs.
        return (
            said.isprintable()
            and " " not in said
            and parts.scheme in ("http", "https")
            and all((parts.hostname or "").removesuffix(".").split("."))
            and parts.port != 0
            and not (parts.path.rstrip("/") or parts.query or parts.fragment or "@" in parts.netloc)
        )
    except ValueError:
        return False


def _api_key(extra_config: Mapping[str, Any]) -> str:
    path = extra_config.get("prefill_api_key_file")
    if path is None:
        key = os.environ.get(KEY_VARIABLE, "").strip()
    else:
        try:
            key = Path(path).read_text(encoding="utf-8").strip()
        except (OSError, TypeError, UnicodeDecodeError) as error:
            raise bad("prefill_api_key_file", path, f"a file that can be read ({error})", _UNKNOWN) from error
        if not key:
            raise bad("prefill_api_key_file", path, "a file with a key", _UNKNOWN)
    if not (key.isascii() and key.isprintable()):
        source = KEY_VARIABLE if path is None else path
        raise SettingsError(
            found=f"a key in {source} that no header can carry",
            expected="one line of printable ASCII",
            consequence="No prefill server could be asked.",
            remedy=f"Correct {source}.",
        )
    return key
