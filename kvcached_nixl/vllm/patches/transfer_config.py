# SPDX-License-Identifier: Apache-2.0
"""Where vLLM reads ``--kv-transfer-config``.

Runs in: every process that constructs the configuration, before any connector is chosen by its name.
"""

from __future__ import annotations

import logging

from kvcached_nixl.patching import Call, Patch
from kvcached_nixl.settings import SERVER_LOGGER
from kvcached_nixl.vllm.adapter.locate import TRANSFER_CONFIG
from kvcached_nixl.vllm.patches.actions.push_class import as_push_mode


@Patch(
    target=TRANSFER_CONFIG,
    attribute="__post_init__",
    process="every",
    parameters=("self",),
    why="A manifest that names vLLM's push connector would be refused: vLLM's own leaves requests waiting for ever.",
    upstream="vllm/distributed/kv_transfer/kv_connector/v1/nixl/connector.py, NixlPushConnector",
    remove_when="vLLM's own push connector passes tests/contract/test_stock_push_defects.py, and serves kvcached",
).around
def post_init(call: Call) -> None:
    if as_push_mode(call.instance, logging.getLogger(SERVER_LOGGER)):
        call.note('NixlPushConnector is served as NixlConnector with "transfer_mode": "push"')
    call.proceed()
