# SPDX-License-Identifier: Apache-2.0
"""Health checks of one server: at intervals, and at once after a failed leg. One task per server."""

from __future__ import annotations

import asyncio
import logging
import re

from kvcached_nixl.proxy.cancel_scope import Guard
from kvcached_nixl.proxy.failure import LegFailed, RouterFailure
from kvcached_nixl.proxy.instance import Health, Instance, Role
from kvcached_nixl.proxy.metrics import Metrics
from kvcached_nixl.proxy.options import Options

__all__ = ["pause_seconds", "watch"]

logger = logging.getLogger("kvcached_nixl.proxy")

MOST_PAUSE_SECONDS = 30.0
MOST_METRICS_BYTES = 8 << 20
LOOKS_PER_METRICS = 5
_FAILURES = re.compile(rb"^kvcached_nixl:handover_failures_total(?:\{[^\n]*\})? ([0-9.eE+]+)", re.MULTILINE)


async def watch(instance: Instance, options: Options, metrics: Metrics) -> None:
    """Runs until cancelled: update the server's state, and count the hand-over failures that it reports."""
    failures, looks = 0, 0
    while True:
        instance.suspected.clear()
        try:
            await _ask(instance, "/health", options)
        except LegFailed as failure:
            failures += 1
            # A server that is new or down needs only one failed check; one that is up needs `health_failures` in a row.
            if instance.state is not Health.UP or failures >= options.health_failures:
                _eject(instance, failure, metrics)
        else:
            failures = 0
            instance.is_doubted = False
            if instance.state is not Health.UP:
                logger.info("%s server %s: up", instance.role.value, instance.name)
                instance.came_up()
            if instance.role is Role.DECODE and looks % LOOKS_PER_METRICS == 0:
                await _look_at_metrics(instance, options, metrics)
            looks += 1
        await _pause(instance, options, failures)


def _eject(instance: Instance, failure: LegFailed, metrics: Metrics) -> None:
    if instance.state is Health.UP:
        metrics.ejections.labels(instance.role.value, instance.name).inc()
    if instance.state is not Health.DOWN:
        logger.warning(
            "%s server %s gets no requests: %s. Its health is checked again at growing intervals.",
            instance.role.value,
            instance.name,
            failure.reason,
        )
    instance.went_down(failure.reason)


def pause_seconds(failures: int, is_up: bool, options: Options) -> float:
    """Returns the time until the next check. After a failure it is short, because requests may wait for the server.

    For a server that is down it doubles with each failed check, so that dead servers cost little.
    """
    if is_up:
        return options.health_interval_seconds / 10 if failures else options.health_interval_seconds
    more = max(0, failures - options.health_failures)
    return min(
        options.health_interval_seconds * 2.0 ** min(more, 16), max(MOST_PAUSE_SECONDS, options.health_interval_seconds)
    )


async def _pause(instance: Instance, options: Options, failures: int) -> None:
    seconds = pause_seconds(failures, instance.state is Health.UP, options)
    if instance.state is Health.UP and failures:
        await asyncio.sleep(seconds)
        return
    waiting = asyncio.ensure_future(instance.suspected.wait())
    try:
        await asyncio.wait({waiting}, timeout=seconds)
    finally:
        waiting.cancel()


async def _ask(instance: Instance, path: str, options: Options) -> bytes:
    late = LegFailed(RouterFailure.TIME, instance.name, f"{path} did not answer in time")
    with Guard() as guard:
        guard.limit(max(options.health_interval_seconds, options.connect_timeout_seconds), late)
        key = [(b"Authorization", b"Bearer " + options.upstream_key.encode())] if options.upstream_key else []
        reply = await instance.connections.ask("GET", path, key)
        try:
            body = await reply.body(MOST_METRICS_BYTES)
        finally:
            reply.close()
        if reply.status != 200:
            raise LegFailed(RouterFailure.SERVER, instance.name, f"{path} answered {reply.status}")
        return body


async def _look_at_metrics(instance: Instance, options: Options, metrics: Metrics) -> None:
    """Count and log the hand-over failures that decode reports: a client cannot see one that was recomputed."""
    try:
        said = await _ask(instance, "/metrics", options)
    except LegFailed as failure:
        logger.debug("%s: %s", instance.name, failure.reason)
        return
    total = sum(float(found) for found in _FAILURES.findall(said))
    before, instance.reported_failures = instance.reported_failures, total
    # A counter that went down was reset by a restart, so all of it is new.
    more = total - (before or 0.0) if before is not None and total >= before else (0.0 if before is None else total)
    if more > 0:
        metrics.reported.labels(instance.name).inc(more)
        logger.warning(
            "decode server %s reports %d more hand-overs that brought no KV: they were recomputed or failed, as its "
            "kv_load_failure_policy says. Its metric kvcached_nixl:handover_failures_total names the causes.",
            instance.name,
            int(more),
        )
