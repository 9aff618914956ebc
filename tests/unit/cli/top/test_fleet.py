# SPDX-License-Identifier: Apache-2.0
"""Which servers there are, who fits whom, and what needs attention."""

from __future__ import annotations

from collections.abc import Iterable

import pytest
from support.metrics_servers import engine_text, router_text

from kvcached_nixl.cli.top.attention import notes
from kvcached_nixl.cli.top.columns import ROUTER
from kvcached_nixl.cli.top.fleet import MOST_SERVERS, Fleet, Server
from kvcached_nixl.cli.top.look import Look, read_series
from kvcached_nixl.cli.top.screen import frame
from kvcached_nixl.cli.top.target import Target, target_of_url

GATE = "10.0.0.1:8000"
UP = {"10.0.0.9:1": ("prefill", 1.0), "10.0.0.10:1": ("prefill", 1.0), "10.0.0.2:1": ("decode", 1.0)}


def look(text: str, at_seconds: float = 0.0) -> Look:
    return Look(at_seconds, read_series(text.splitlines())[0], is_router=f"# TYPE {ROUTER}" in text)


def said(fleet: Fleet, name: str, text: str, at_seconds: float = 0.0) -> None:
    server(fleet, name).answered(look(text, at_seconds))


def server(fleet: Fleet, name: str) -> Server:
    return next(one for one in fleet if one.target.name == name)


def fleet_of(*urls: str) -> Fleet:
    return Fleet([target_of_url(url) for url in urls])


def routed(text: str | None = None, **engines: str) -> Fleet:
    """A fleet behind one router."""
    fleet = fleet_of(f"http://{GATE}")
    said(fleet, GATE, text or router_text(UP))
    fleet.follow()
    for name in UP:
        said(fleet, name, engines.get(name, engine_text()))
    return fleet


def told(fleet: Fleet) -> list[tuple[str, str]]:
    return [tuple(one) for one in notes(fleet)]


def names(of: Iterable[Server]) -> list[str]:
    return [one.name for one in of]


def test_a_router_names_its_servers() -> None:
    """With their roles; the table has prefill first, and numbers in order."""
    fleet = routed()
    assert names(fleet.routers) == [GATE]
    assert [(one.name, one.server.role) for one in fleet.engines] == [
        ("10.0.0.9:1", "prefill"),
        ("10.0.0.10:1", "prefill"),
        ("10.0.0.2:1", "decode"),
    ]
    assert server(fleet, "10.0.0.2:1").target.url == "http://10.0.0.2:1/metrics"
    assert not fleet.follow() and told(fleet) == []


def test_a_server_that_the_command_line_names_too_is_asked_as_it_says() -> None:
    fleet = fleet_of(f"http://{GATE}", "https://10.0.0.2:1")
    said(fleet, GATE, router_text(UP))
    assert fleet.follow()
    assert server(fleet, "10.0.0.2:1").target.url == "https://10.0.0.2:1/metrics"
    assert server(fleet, "10.0.0.2:1").role == "decode"


def test_a_server_that_the_router_has_removed_goes_and_a_given_one_stays() -> None:
    fleet = fleet_of(f"http://{GATE}", "http://10.0.0.2:1")
    said(fleet, GATE, router_text(UP))
    fleet.follow()
    said(fleet, GATE, router_text({}))
    assert not fleet.follow()
    assert names(fleet) == [GATE, "10.0.0.2:1"] and server(fleet, "10.0.0.2:1").role == ""


def test_a_router_that_does_not_answer_keeps_its_servers() -> None:
    fleet = routed()
    server(fleet, GATE).failed("connection refused")
    fleet.follow()
    assert len(names(fleet)) == 4
    assert told(fleet) == [(GATE, "does not answer: connection refused")]


def test_what_a_silent_router_said_of_health_does_not_count() -> None:
    fleet = routed(router_text({**UP, "10.0.0.2:1": ("decode", 0.0)}))
    server(fleet, GATE).failed("connection refused")
    fleet.follow()
    assert told(fleet) == [(GATE, "does not answer: connection refused")]


def test_only_routers_that_are_given_are_followed() -> None:
    """A server that a router names cannot lead to others."""
    fleet = fleet_of(f"http://{GATE}")
    said(fleet, GATE, router_text({"10.0.0.5:1": ("decode", 1.0)}))
    fleet.follow()
    said(fleet, "10.0.0.5:1", router_text({"169.254.169.254:80": ("decode", 1.0)}))
    assert not fleet.follow()
    assert names(fleet) == [GATE, "10.0.0.5:1"]


def test_a_router_cannot_have_servers_without_end_asked() -> None:
    fleet = fleet_of(f"http://{GATE}")
    said(fleet, GATE, router_text({f"10.0.0.1:{port}": ("decode", 1.0) for port in range(1, 3000)}))
    assert fleet.follow()
    assert len(names(fleet)) == MOST_SERVERS
    assert ("fleet", f"servers that routers name, and that are too many to ask: {2999 - MOST_SERVERS + 1}") in told(
        fleet
    )


def test_a_name_that_cannot_be_asked_is_shown_and_not_asked() -> None:
    fleet = fleet_of(f"http://{GATE}")
    said(fleet, GATE, router_text({"x\x1b[2J@y:80": ("decode\x07", 1.0)}))
    fleet.follow()
    (engine,) = fleet.engines
    assert (engine.name, engine.server.role, engine.server.target.url) == ("x\\x1b[2J@y:80", "decode\\x07", "")
    assert [name for name, _ in told(fleet)] == ["x\\x1b[2J@y:80"]


def test_data_parallel_engines_have_a_row_each() -> None:
    fleet = fleet_of("http://10.0.0.2:1")
    said(fleet, "10.0.0.2:1", engine_text("0") + engine_text("1", failed_lease=1.0), 1.0)
    said(fleet, "10.0.0.2:1", engine_text("0") + engine_text("1", failed_lease=3.0), 3.0)
    assert [one.name for one in fleet.engines] == ["10.0.0.2:1 #0", "10.0.0.2:1 #1"]
    assert told(fleet) == [("10.0.0.2:1 #1", "hand-overs failed since the last look: lease +2")]


def test_a_server_with_several_engines_fails_once() -> None:
    fleet = fleet_of("http://10.0.0.2:1", "http://10.0.0.3:1")
    said(fleet, "10.0.0.2:1", engine_text("0") + engine_text("1"))
    said(fleet, "10.0.0.3:1", engine_text("0") + engine_text("1", quarantined_blocks=2.0))
    server(fleet, "10.0.0.2:1").failed("connection refused")
    assert told(fleet) == [
        ("10.0.0.2:1", "does not answer: connection refused"),
        ("10.0.0.3:1 #1", "blocks in quarantine: 2"),
    ]
    assert frame(fleet, 100).marked == [0, 1, 3]


def test_peers_that_fit() -> None:
    """Of the other role where roles are known; otherwise of all others."""
    fleet = routed(**{"10.0.0.2:1": engine_text(weights_id=5.0, checkpoint_id=8.0)})
    assert fleet.fits() == {"10.0.0.9:1": (1, 1), "10.0.0.10:1": (1, 1), "10.0.0.2:1": (2, 2)}
    alone = fleet_of("http://a:1", "http://b:1", "http://c:1")
    for name, kind in {"a:1": 7.0, "b:1": 7.0, "c:1": 6.0}.items():
        said(alone, name, engine_text(compatibility_id=kind))
    assert alone.fits() == {"a:1": (1, 2), "b:1": (1, 2), "c:1": (0, 2)}


def test_an_engine_that_fits_nobody_needs_attention() -> None:
    fleet = routed(**{"10.0.0.2:1": engine_text(compatibility_id=1.0)})
    assert ("10.0.0.2:1", "fits none of 2 peers: hand-overs with them would be refused") in told(fleet)


def test_an_engine_that_does_not_say_its_kind_is_left_out() -> None:
    """Stock vLLM, or an engine on another host than its API server."""
    fleet = routed(**{"10.0.0.2:1": "vllm:num_requests_running 0\n", "10.0.0.9:1": engine_text(compatibility_id=0.0)})
    assert fleet.fits() == {"10.0.0.10:1": (0, 0)} and told(fleet) == []


ENGINE_NOTES = {
    "hand-overs failed since the last look: peer +2, lease +1": ({}, {"failed_lease": 1.0, "failed_peer": 2.0}),
    "offers taken back since the last look: blocks +3": ({"revoked_blocks": 1.0}, {"revoked_blocks": 4.0}),
    "blocks in quarantine: 12": ({}, {"quarantined_blocks": 12.0}),
    "full: 9000 tokens wait, and all of its memory holds 10k": (
        *({}, {"used_tokens": 9000.0, "free_tokens": 1000.0, "queued_tokens": 9000.0}),
    ),
}


@pytest.mark.parametrize("note", ENGINE_NOTES)
def test_what_needs_attention_of_an_engine(note: str) -> None:
    before, now = ENGINE_NOTES[note]
    fleet = fleet_of("http://a:1")
    said(fleet, "a:1", engine_text(**before), 1.0)
    assert told(fleet) == []
    said(fleet, "a:1", engine_text(**now), 3.0)
    assert told(fleet) == [("a:1", note)]


ROUTER_NOTES = {
    "requests failed since the last look: full +3, handover +1": {
        "outcomes": {"ok": 9.0, "client_left": 4.0, "full": 3.0, "handover": 1.0}
    },
    "servers that stopped getting requests since the last look: 2": {"ejections_total": 2.0},
    "decode computed prompts since the last look: no_prefill +5": {
        'decode_alone_total{reason="no_prefill"}': 5.0,
        'decode_alone_total{reason="cheaper"}': 5.0,
    },
}


@pytest.mark.parametrize("note", ROUTER_NOTES)
def test_what_needs_attention_of_a_router(note: str) -> None:
    fleet = fleet_of(f"http://{GATE}")
    said(fleet, GATE, router_text({}), 1.0)
    assert told(fleet) == []
    said(fleet, GATE, router_text({}, **ROUTER_NOTES[note]), 3.0)  # type: ignore[arg-type]
    assert told(fleet) == [(GATE, note)]


def test_a_server_that_the_router_gives_nothing_to_needs_attention() -> None:
    fleet = routed(router_text({**UP, "10.0.0.2:1": ("decode", 0.0)}))
    assert told(fleet) == [("10.0.0.2:1", "gets no requests: the router's health checks fail")]


def test_an_answer_ends_a_failure_and_lines_that_cannot_be_read_are_told() -> None:
    fleet = Fleet([Target("a:1", "http://a:1/metrics")])
    server(fleet, "a:1").failed("no such host")
    assert told(fleet) == [("a:1", "does not answer: no such host")]
    server(fleet, "a:1").answered(Look(0.0, look(engine_text()).series, unread_lines=3))
    assert told(fleet) == [("a:1", "lines of its metrics that cannot be read: 3")]
