# SPDX-License-Identifier: Apache-2.0
"""``doctor --prefill``: asks each prefill server once for the KV of a few tokens, as decode would."""

from __future__ import annotations

import re
import secrets
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from kvcached_nixl.errors import SettingsError
from kvcached_nixl.scheduler.asking.asker import Asker, taken
from kvcached_nixl.scheduler.asking.resolver import addresses_of, is_name
from kvcached_nixl.scheduler.asking.server import Server
from kvcached_nixl.scheduler.asking.settings import KEY_VARIABLE, AskSettings
from kvcached_nixl.transport.side_channel import SideChannel
from kvcached_nixl.vllm.adapter.versions import found_version
from kvcached_nixl.wire.causes import FailureCause, HandOverFailed
from kvcached_nixl.wire.handshake import is_tagged
from kvcached_nixl.wire.params import read_fetch
from kvcached_nixl.wire.question import Outcome, Question

ANSWER_SECONDS = 60.0
_TOKENS = (1, 2, 3, 4)
"""Of every vocabulary."""
_VLLM = re.compile(r"\[vLLM ([^;\]]+)")
_REMEDIES = (
    ("HTTP 401", f"Put prefill's --api-key into {KEY_VARIABLE}, or into a file for --prefill-api-key-file."),
    ("Certificate", "With https the certificate has to be valid for the URL's host name: name that one."),
    (
        "offers no KV",
        "Start it with ENABLE_KVCACHED=true, and with NixlConnector and kv_role kv_producer in --kv-transfer-config.",
    ),
)

_STOCK = (
    "its kv_transfer_params are those of vLLM's own NixlConnector: it runs without this package. Install kvcached-nixl "
    "there, and start it with ENABLE_KVCACHED=true."
)


@dataclass(frozen=True)
class Found:
    """One prefill server, at one address of its name.

    Attributes:
        said: what it is, as (name, value).
        why_not: why decode could not use its KV; "" if it could, as far as it is known here.
        tag: what must be equal on decode's side; "" if it is not known.
    """

    server: str
    said: tuple[tuple[str, str], ...] = ()
    why_not: str = ""
    tag: str = ""


def examine(urls: Sequence[str], api_key_file: str | None) -> tuple[Found, ...]:
    """Ask all of them. Raises SettingsError: a URL or the file cannot be used; decode would not start with them."""
    extra = {"prefill": [*urls], "prefill_api_key_file": api_key_file}
    try:
        settings = AskSettings.from_extra_config(extra, is_consumer=True, is_producer=False)
    except SettingsError as error:
        raise _of_option(error) from error
    servers, unknown = [], []
    for url in settings.servers:
        addresses = addresses_of(url) if is_name(url) else ("",)
        servers += [Server(url, address) for address in addresses]
        unknown += [] if addresses else [Found(url, why_not="this host finds no address of its name")]
    channel = SideChannel()
    try:
        found = [_judge(*one, channel) for one in _asked(servers, settings.api_key)]
    finally:
        channel.close()
    return (*unknown, *found)


def _of_option(error: SettingsError) -> SettingsError:
    """The error of a key of a server's configuration, for the option with its name."""
    found = error.found.removeprefix("kv_connector_extra_config has ")
    if found == error.found:
        return error
    key, _, value = found.partition("=")
    option = f"--{key.replace('_', '-')}"
    return SettingsError(
        found=f"{option} {value}",
        expected=error.expected,
        consequence=error.consequence,
        remedy=f"Correct {option}.",
    )


def _asked(servers: Sequence[Server], api_key: str) -> list[tuple[Server, dict[str, Any] | Outcome, bool]]:
    """Each server with its answer, and whether its ``/health`` is 200."""
    woken = threading.Event()
    asker, name = Asker(api_key, woken.set), f"kvcached-nixl-doctor-{secrets.token_hex(4)}"
    answers: dict[int, dict[str, Any] | Outcome] = {}
    is_well: dict[int, bool] = {}
    for number, server in enumerate(servers):
        asker.check(server)
        asker.ask(number, server, Question(f"{name}-{number}", _TOKENS))
    until_seconds = time.monotonic() + ANSWER_SECONDS
    while len(answers) + len(is_well) < 2 * len(servers) and woken.wait(max(0.0, until_seconds - time.monotonic())):
        woken.clear()
        answers.update(taken(asker.answers))
        is_well.update((servers.index(server), well) for server, well in taken(asker.checked))
    asker.close()
    silent = Outcome(f"no answer within {ANSWER_SECONDS:g} s; decode would wait")
    return [(one, answers.get(place, silent), is_well.get(place, False)) for place, one in enumerate(servers)]


def _judge(server: Server, answer: dict[str, Any] | Outcome, is_well: bool, channel: SideChannel) -> Found:
    health = ("/health", "200" if is_well else "not 200")
    if isinstance(answer, Outcome):
        remedy = next((remedy for word, remedy in _REMEDIES if word in answer.reason), "")
        return Found(str(server), (health,), f"{answer.reason}. {remedy}".rstrip())
    try:
        fetch = read_fetch(answer, "", may_rendezvous=False)
    except HandOverFailed as failure:
        why = _STOCK if failure.cause is FailureCause.NO_MANIFEST else str(failure)
        return Found(str(server), (health,), why)
    there = fetch.prefill
    said = (
        health,
        ("transfer_mode", str(answer.get("transfer_mode"))),
        ("engine", f"{there.engine_id}, tensor-parallel size {there.tp_size}"),
        ("side channel", f"{there.host}:{there.port}"),
    )
    try:
        tag, _ = channel.ask(there.host, there.port, 0).result()
    except (OSError, TimeoutError, ValueError) as error:
        why = f"its side channel {there.host}:{there.port} does not answer here: {error or type(error).__name__}. Set "
        return Found(str(server), said, f"{why}VLLM_NIXL_SIDE_CHANNEL_HOST there to an address that decode reaches.")
    # What follows the version is the model's configuration, setting by setting.
    return Found(str(server), (*said, ("versions", f"{tag.partition(';')[0]:.200}; ...")), _against(tag), tag)


def _against(tag: str) -> str:
    """Why this environment's versions would refuse the engine; "" if they would not."""
    here = found_version("vllm")
    if not is_tagged(tag):
        return f"its side channel says {tag[:200]!r}; expected this package. Start it with ENABLE_KVCACHED=true."
    there = _VLLM.search(tag)
    # A distribution may have a local part that the module does not state.
    if here is not None and there is not None and there[1].partition("+")[0] != here.partition("+")[0]:
        return f"it has vLLM {there[1]}, and vLLM here is {here}: decode would refuse it. Install the same version."
    return ""


def render(found: Sequence[Found]) -> str:
    """The findings as text of several lines, without a newline at the end."""
    lines = []
    for one in found:
        lines += [f"{one.server}: {'would not serve' if one.why_not else 'serves'}"]
        lines += [f"  {name:<14} {value}" for name, value in (*one.said, *([("why", one.why_not)] * bool(one.why_not)))]
    return "\n".join(lines)


def to_json(found: Sequence[Found]) -> list[Mapping[str, Any]]:
    return [
        {"server": one.server, **dict(one.said), "must be equal": one.tag, "why_not": one.why_not or None}
        for one in found
    ]
