# SPDX-License-Identifier: Apache-2.0
"""`vllm.patches.arrival`: which request is accepted under which id, with stand-ins for vLLM's requests."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from kvcached_nixl.vllm.patches.arrival import Arrival, arrival_of, drop_unless_mapping


def of(name: str = "r", *, client: int = 0, ended: bool = False, session: bool = False, **more: Any) -> SimpleNamespace:
    queue = [] if session else None
    fields = {"request_id": name, "client_index": client, "streaming_queue": queue, "abort_immediately": False, **more}
    return SimpleNamespace(is_finished=lambda: ended, **fields)


@pytest.mark.parametrize(
    ("existing", "comes", "expected"),
    [
        (None, of(), Arrival.FIRST),
        (of("another"), of(), Arrival.FIRST),
        (of(), of(), Arrival.REPEATED),
        (of(ended=True), of(), Arrival.REPEATED),
        (of(session=True), of(), Arrival.MORE),
        (of(session=True), of(client=1), Arrival.REPEATED),
        (of(session=True, ended=True), of(), Arrival.REPEATED),
        (of(session=True), of(abort_immediately=True), Arrival.REPEATED),
        (of(ended=True), of(abort_immediately=True), Arrival.REPEATED),
    ],
)
def test_only_a_session_goes_on_under_its_id(existing: Any, comes: Any, expected: Arrival) -> None:
    """What has ended counts while its blocks are kept."""
    scheduler = SimpleNamespace(requests={} if existing is None else {existing.request_id: existing})
    assert arrival_of(scheduler, comes) is expected


@pytest.mark.parametrize(
    "params", [[], "do_remote_prefill", 7, [["do_remote_prefill", True]], {"do_remote_prefill": True}]
)
def test_parameters_that_are_no_mapping_are_dropped(params: Any) -> None:
    """Before vLLM's scheduler reads them: from 0.32 on an error there ends the engine."""
    asked = SimpleNamespace(kv_transfer_params=params)
    drop_unless_mapping(asked)
    assert asked.kv_transfer_params is (params if isinstance(params, dict) else None)
