# SPDX-License-Identifier: Apache-2.0
"""Health checks of one server: at intervals, and at once after a failed leg. One task per server.

Slow is not dead. A server is down where nobody listens, or where it says itself that it cannot serve, several times in
a row. A check that goes unanswered says nothing by itself: only a server that has sent no byte at all for
``unresponsive_timeout_seconds``, to no leg and to no check, counts as silent, and then only its silent legs end.
"""

from __future__ import annotations

import asyncio
import logging
import re
import time

from kvcached_nixl.proxy.cancel_scope import Guard
from kvcached_nixl.proxy.failure import LegFailed, RouterFailure
from kvcached_nixl.proxy.fleet import Fleet
from kvcached_nixl.proxy.instance import Health, Instance, Role
from kvcached_nixl.proxy.kind import capacity_of, kind_of

__all__ = ["pause_seconds", "watch"]

logger = logging.getLogger("kvcached_nixl.proxy")

MOST_PAUSE_SECONDS = 30.0
MOST_METRICS_BYTES = 8 << 20
LOOK_SECONDS = 30.0
GONE_SECONDS = 15.0
"""How long a request may hear nothing from a server where nobody listens. vLLM 0.28 leaves some requests without an end
when it shuts down, and keeps their connections."""
METRICS_SECONDS = 2.0
"""A server that answers /health and not /metrics is up, and its kind is not known."""
STALE_SECONDS = 30.0
"""After so long without its metrics, what a server said of its memory counts no more."""
LOOKS_PER_METRICS = 5
LEAST_METRICS_SECONDS = 1.0
MOST_COUNT = 2.0**53
"""A larger number is no count. The router's own counter could not be increased any more after it."""
_FAILURES = re.compile(
    rb"^kvcached_nixl:handover_failures_total(?:\{[^\n]*\})? ([0-9]{1,300}(?:\.[0-9]*)?(?:[eE][+-]?[0-9]{1,4})?)$",
    re.M,
)
_CERTAIN = (RouterFailure.UNREACHABLE, RouterFailure.BROKEN, RouterFailure.SERVER)


async def watch(instance: Instance, fleet: Fleet) -> None:
    """Runs until cancelled: update the server's state and kind, and count the hand-over failures that it reports."""
    failures, read_at_seconds, due_seconds, heard_at_seconds = 0, -LEAST_METRICS_SECONDS, 0.0, 0.0
    # Asked each time, since a cancellation can be lost before Python 3.11.
    while fleet.is_known(instance):
        if instance.suspected.is_set():
            due_seconds = min(due_seconds, read_at_seconds + LEAST_METRICS_SECONDS)
        instance.suspected.clear()
        try:
            await _ask(instance, "/health", fleet, LOOK_SECONDS)
            if instance.state is not Health.UP or time.monotonic() >= due_seconds:
                read_at_seconds = time.monotonic()
                is_read = await _look_at_metrics(instance, fleet)
                if is_read:
                    heard_at_seconds = read_at_seconds
                elif time.monotonic() - heard_at_seconds >= STALE_SECONDS:
                    # What others asked of it has ended since, perhaps; this router would never learn of it.
                    instance.capacity = None
                    fleet.admission.look()
                is_filling = instance.capacity is not None and instance.capacity.is_filling
                pause_looks = LOOKS_PER_METRICS if is_read and not is_filling else 1
                due_seconds = time.monotonic() + pause_looks * fleet.options.health_interval_seconds
        except LegFailed as failure:
            failures += failure.cause in _CERTAIN
            _judge(instance, failure, failures, fleet)
        except Exception:
            # A watcher that ended would leave the server as it is for good.
            logger.exception("%s server %s: the check of its health failed", instance.role.value, instance.name)
        else:
            failures = 0
            if instance.state is not Health.UP:
                # Of a server that is up, only its answers to requests end the doubt.
                instance.succeeded()
            _set(instance, Health.UP, "", fleet)
        await _pause(instance, fleet, failures, due_seconds)


def _judge(instance: Instance, failure: LegFailed, failures: int, fleet: Fleet) -> None:
    options = fleet.options
    if failure.cause in _CERTAIN:
        # A server that is new or down needs only one such check; one that is up needs `health_failures` in a row.
        if instance.state is not Health.UP or failures >= options.health_failures:
            _set(instance, Health.DOWN, failure.reason, fleet)
        if instance.state is Health.DOWN and failure.cause is RouterFailure.UNREACHABLE:
            instance.end_legs(
                "nobody listens there any more, and nothing has come",
                min(GONE_SECONDS, options.unresponsive_timeout_seconds),
            )
        return
    silent_seconds = time.monotonic() - instance.heard_seconds
    if instance.state is Health.UP and silent_seconds >= options.unresponsive_timeout_seconds:
        reason = f"it has sent nothing for {silent_seconds:.0f} s"
        _set(instance, Health.SILENT, reason, fleet)
        instance.end_legs(reason, options.unresponsive_timeout_seconds)


def _set(instance: Instance, state: Health, reason: str, fleet: Fleet) -> None:
    before, instance.state = instance.state, state
    if reason:
        instance.last_failure = reason
    if before is state:
        return
    if state is Health.UP:
        logger.info("%s server %s: up", instance.role.value, instance.name)
        instance.is_warned = False
    else:
        instance.ranks.forget()
        instance.kind = instance.capacity = None
        instance.epoch = time.monotonic_ns()
        if before is Health.UP:
            fleet.metrics.ejections.labels(instance.role.value, instance.name).inc()
        logger.warning(
            "%s server %s gets no requests: %s. Its health is checked again at growing intervals.",
            instance.role.value,
            instance.name,
            reason,
        )
    fleet.notify()


def pause_seconds(failures: int, is_up: bool, interval_seconds: float, most_failures: int) -> float:
    """Returns the time until the next check. After a failure it is short, because requests may wait for the server.

    For a server that is down it doubles with each failed check, so that dead servers cost little.
    """
    if is_up:
        return interval_seconds / 10 if failures else interval_seconds
    more = max(0, failures - most_failures)
    return min(interval_seconds * 2.0 ** min(more, 16), max(MOST_PAUSE_SECONDS, interval_seconds))


async def _pause(instance: Instance, fleet: Fleet, failures: int, due_seconds: float) -> None:
    options = fleet.options
    is_up = instance.state is Health.UP
    seconds = pause_seconds(failures, is_up, options.health_interval_seconds, options.health_failures)
    if is_up and not failures:
        seconds = min(seconds, max(0.0, due_seconds - time.monotonic()))
    instance.next_look_seconds = time.monotonic() + seconds
    if is_up and failures:
        await asyncio.sleep(seconds)
        return
    waiting = asyncio.ensure_future(instance.suspected.wait())
    try:
        await asyncio.wait({waiting}, timeout=seconds)
    finally:
        waiting.cancel()


async def _ask(instance: Instance, path: str, fleet: Fleet, limit_seconds: float) -> bytes:
    late = LegFailed(RouterFailure.TIME, instance.name, f"{path} did not answer in time")
    key = fleet.options.upstream_key
    headers = {"Authorization": f"Bearer {key}"} if key else {}
    with Guard() as guard:
        guard.limit(min(limit_seconds, fleet.options.unresponsive_timeout_seconds / 2), late)
        async with fleet.upstream.ask("GET", instance.url + path, instance.name, headers) as reply:
            instance.heard_seconds = time.monotonic()
            body = await reply.body(MOST_METRICS_BYTES)
            if reply.status != 200:
                raise LegFailed(RouterFailure.SERVER, instance.name, f"{path} answered {reply.status}")
            return body
    raise AssertionError("unreachable")


async def _look_at_metrics(instance: Instance, fleet: Fleet) -> bool:
    """Learn which servers this one fits, and count the hand-over failures that decode reports.

    A client cannot see a failure that was recomputed.

    Returns: whether they could be read.
    """
    try:
        said = await _ask(instance, "/metrics", fleet, METRICS_SECONDS)
    except LegFailed as failure:
        logger.debug("%s: %s", instance.name, failure.reason)
        return False
    instance.capacity, instance.sent_tokens = capacity_of(said), 0
    before_kind, instance.kind = instance.kind, kind_of(said)
    if before_kind != instance.kind:
        fleet.notify()
    if instance.role is not Role.DECODE:
        return True
    fleet.admission.look()
    total = sum(count for found in _FAILURES.findall(said) if (count := float(found)) <= MOST_COUNT)
    before, instance.reported_failures = instance.reported_failures, total
    # A counter that went down was reset by a restart, so all of it is new.
    more = total - (before or 0.0) if before is not None and total >= before else (0.0 if before is None else total)
    if more > 0:
        fleet.metrics.reported.labels(instance.name).inc(more)
        logger.warning(
            "decode server %s reports %.0f more hand-overs that brought no KV: they were recomputed or failed, as its "
            "kv_load_failure_policy says. Its metric kvcached_nixl:handover_failures_total names the causes.",
            instance.name,
            more,
        )
    return True
