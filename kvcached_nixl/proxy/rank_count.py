# SPDX-License-Identifier: Apache-2.0
"""Asks a prefill server how many data-parallel ranks it has. Once per incarnation of the server.

vLLM refuses a request that names a rank it does not have, and reports the valid range, before it computes anything
(vllm/v1/engine/input_processor.py, 0.26 to 0.30). So the router sends a one-token prompt that names an impossible rank.
"""

from __future__ import annotations

from typing import Any

import msgspec

from kvcached_nixl.proxy.api import ApiRoute
from kvcached_nixl.proxy.asked import Asked
from kvcached_nixl.proxy.failure import LegFailed, RouterFailure
from kvcached_nixl.proxy.instance import Instance
from kvcached_nixl.proxy.options import Options
from kvcached_nixl.proxy.ranks import RANK_HEADER, range_of
from kvcached_nixl.proxy.upstream import Upstream

__all__ = ["ask_rank_count"]

NOBODY = 2**31 - 1
MOST_ANSWER_BYTES = 1 << 20


async def ask_rank_count(
    server: Instance, asked: Asked, headers: dict[str, str], upstream: Upstream, options: Options
) -> None:
    """Ask the server, and store the result in ``server.ranks``. Without an answer, a later request asks again.

    Args:
        asked: a client's request. Its model is used, because the client's key may be valid for that model only.
        headers: of a leg of that request.
    """
    fields: dict[str, Any] = {name: asked.fields[name] for name in ("model",) if name in asked.fields}
    body = msgspec.json.encode({**fields, "prompt": [1], "max_tokens": 1})
    late = LegFailed(RouterFailure.TIME, server.name, "the server did not answer in time", status=504)
    ranks, count, has_answered = server.ranks, None, False
    ranks.asking()
    try:
        with server.leg(0) as leg:
            leg.guard.limit(options.connect_timeout_seconds + options.health_interval_seconds, late)
            url, headers = server.url + ApiRoute.COMPLETIONS.value, {**headers, RANK_HEADER: str(NOBODY)}
            async with upstream.ask("POST", url, server.name, headers, body) as reply:
                said = await reply.body(MOST_ANSWER_BYTES)
                leg.heard()
            has_answered = reply.status in (200, 400)
            count = range_of(said, NOBODY) if reply.status == 400 else None
    except LegFailed:
        # Ignored: the prefill leg that follows reports what is wrong with the server.
        pass
    finally:
        if count is not None:
            ranks.counted(count)
        elif has_answered:
            ranks.uncountable()
        else:
            ranks.uncounted()
