# SPDX-License-Identifier: Apache-2.0
"""How many data-parallel ranks a prefill server has: asked of itself, once per start of it.

vLLM refuses a request that names a rank it does not have, and says which there are, before it computes anything
(vllm/v1/engine/input_processor.py, 0.19 to 0.30). So one that no server has is named, with a prompt of one token.
"""

from __future__ import annotations

from typing import Any

import msgspec

from kvcached_nixl.proxy.failure import LegFailed, RouterFailure
from kvcached_nixl.proxy.instance import Instance
from kvcached_nixl.proxy.options import Options
from kvcached_nixl.proxy.ranks import RANK_HEADER, range_of
from kvcached_nixl.proxy.request_body import Asked, Route

__all__ = ["ask_rank_count"]

NOBODY = 2**31 - 1
MOST_ANSWER_BYTES = 1 << 20


async def ask_rank_count(server: Instance, asked: Asked, headers: list[tuple[bytes, bytes]], options: Options) -> None:
    """Ask, and have ``server.ranks`` know it. A server that cannot be asked now is asked another time.

    Args:
        asked: a client's request, whose model is asked for: a key may be for that alone.
        headers: of a leg of it.
    """
    fields: dict[str, Any] = {name: asked.fields[name] for name in ("model",) if name in asked.fields}
    body = msgspec.json.encode({**fields, "prompt": [1], "max_tokens": 1})
    late = LegFailed(RouterFailure.TIME, server.name, "the server has not answered in time", status=504)
    ranks, count, has_answered = server.ranks, None, False
    ranks.asking()
    try:
        with server.leg(0) as guard:
            guard.limit(options.connect_timeout_seconds + options.health_interval_seconds, late)
            headers = [*headers, (RANK_HEADER, b"%d" % NOBODY)]
            reply = await server.connections.ask("POST", Route.COMPLETIONS.value, headers, body)
            try:
                said = await reply.body(MOST_ANSWER_BYTES)
            finally:
                reply.close()
            has_answered = reply.status in (200, 400)
            count = range_of(said, NOBODY) if reply.status == 400 else None
    except LegFailed:
        # The leg that follows says what is wrong with the server.
        pass
    finally:
        if count is not None:
            ranks.counted(count)
        elif has_answered:
            ranks.uncountable()
        else:
            ranks.uncounted()
