# SPDX-License-Identifier: Apache-2.0
"""vLLM's own push connector as a mode of ``NixlConnector``.

Sources: ``vllm/config/kv_transfer.py``; ``NixlPushConnector`` in ``kv_connector/v1/nixl/connector.py``.
"""

from __future__ import annotations

from collections.abc import Mapping
from logging import Logger
from typing import Any

from kvcached_nixl.errors import SettingsError
from kvcached_nixl.transfer_mode import TransferMode
from kvcached_nixl.vllm.adapter.locate import PUSH_CLASS_NAMES

__all__ = ["as_push_mode"]


_NAME, _MODULE, _EXTRA = "kv_connector", "kv_connector_module_path", "kv_connector_extra_config"


def as_push_mode(config: Any, logger: Logger) -> bool:
    """Replace ``NixlPushConnector`` in a configuration by ``NixlConnector`` with ``"transfer_mode": "push"``.

    Also among the children of a ``MultiConnector``.

    So vLLM's checks that look for the name ``NixlConnector`` apply, and all processes know a connector's metrics by one
    name.

    Args:
        config: a ``KVTransferConfig`` that is being constructed.

    Returns: whether it named that class.

    Raises:
        SettingsError: it also has another ``transfer_mode``.
    """
    given = {name: getattr(config, name) for name in (_NAME, _MODULE, _EXTRA)}
    found = _in_push_mode(given)
    if found == given:
        return False
    logger.info('kv_connector NixlPushConnector is NixlConnector with "transfer_mode": "push" in kvcached_nixl')
    config.kv_connector, config.kv_connector_extra_config = found[_NAME], found[_EXTRA]
    return True


def _in_push_mode(config: Mapping[str, Any]) -> dict[str, Any]:
    found, extra = dict(config), config.get(_EXTRA)
    if isinstance(extra, Mapping) and isinstance(children := extra.get("connectors"), list):
        of_children = [_in_push_mode(one) if isinstance(one, Mapping) else one for one in children]
        found[_EXTRA] = {**extra, "connectors": of_children}
    name = config.get(_NAME)
    # Somebody's own class may have the same name, and somebody's own connector anything below this key.
    if isinstance(name, str) and name in PUSH_CLASS_NAMES and config.get(_MODULE) is None:
        asked = (extra or {}).get("transfer_mode", TransferMode.PUSH.value)
        if asked != TransferMode.PUSH.value:
            raise SettingsError(
                found=f"kv_connector {name} with transfer_mode={asked!r}",
                expected='"push", or no transfer_mode',
                consequence="It is not known which side starts transfers.",
                remedy='Remove "transfer_mode" from kv_connector_extra_config, or set "kv_connector": "NixlConnector".',
            )
        found[_NAME] = "NixlConnector"
        found[_EXTRA] = {**(extra or {}), "transfer_mode": asked}
    return found
