# SPDX-License-Identifier: Apache-2.0
"""vLLM's own push connector as a mode of ``NixlConnector``.

Sources: ``vllm/config/kv_transfer.py``; ``NixlPushConnector`` in ``kv_connector/v1/nixl/connector.py``, from 0.24 on.
"""

from __future__ import annotations

from logging import Logger
from typing import Any

from kvcached_nixl.compat.locate import PUSH_CLASS_NAMES
from kvcached_nixl.errors import SettingsError
from kvcached_nixl.transfer_mode import TransferMode

__all__ = ["as_push_mode"]


def as_push_mode(config: Any, logger: Logger) -> bool:
    """Replace ``NixlPushConnector`` in a configuration by ``NixlConnector`` with ``"transfer_mode": "push"``.

    So vLLM's checks that look for the name ``NixlConnector`` apply, and all processes know a connector's metrics by one
    name.

    Args:
        config: a ``KVTransferConfig`` that is being constructed; `MultiConnector` constructs one for each child.

    Returns: whether it named that class.

    Raises:
        SettingsError: it also has another ``transfer_mode``.
    """
    # Somebody's own class may have the same name.
    if config.kv_connector not in PUSH_CLASS_NAMES or config.kv_connector_module_path is not None:
        return False
    extra = dict(config.kv_connector_extra_config)
    asked = extra.setdefault("transfer_mode", TransferMode.PUSH.value)
    if asked != TransferMode.PUSH.value:
        raise SettingsError(
            found=f"kv_connector {config.kv_connector} with transfer_mode={asked!r}",
            expected='"push", or no transfer_mode',
            consequence="It is not known which side starts transfers.",
            remedy='Remove "transfer_mode" from kv_connector_extra_config, or set "kv_connector": "NixlConnector".',
        )
    logger.info(
        'kv_connector %s is served as NixlConnector with "transfer_mode": "push", by kvcached_nixl',
        config.kv_connector,
    )
    config.kv_connector, config.kv_connector_extra_config = "NixlConnector", extra
    return True
