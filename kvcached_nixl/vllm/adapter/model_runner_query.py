# SPDX-License-Identifier: Apache-2.0
"""Ask vLLM which model runner it uses for a model.

Sources: vLLM's ``engine/arg_utils.py`` and ``config/vllm.py`` (``VllmConfig.use_v2_model_runner``).
"""

from __future__ import annotations

import contextlib
import importlib
import logging
import os
from collections.abc import Iterator
from typing import Any

from kvcached_nixl.errors import Refused
from kvcached_nixl.vllm.adapter.model_runner_policy import SWITCH, RunnerFound, accepted, judged, named, outlook, stated
from kvcached_nixl.vllm.adapter.private import private

__all__ = ["ask", "runner_of"]

_CONFIG = "vllm.config.vllm"
_TRITON = "HAS_TRITON"


def ask(model: str, vllm: str) -> tuple[RunnerFound, ...]:
    """Ask vLLM which runner it uses for a model, all other options at their defaults. Imports vLLM, starts nothing.

    On a CPU it is asked twice, the second time as if there were a GPU. Apart from ROCm, the choice depends on the
    device only by whether Triton is available.

    Args:
        model: a folder, or a name. With ``HF_HUB_OFFLINE`` set before vLLM is imported, nothing is downloaded.
        vllm: the version of vLLM.

    Raises:
        SettingsError: see `stated`.
        Refused: vLLM cannot make a configuration for this model.
    """
    wish = stated(os.environ)
    if not accepted(vllm):
        return outlook(vllm, os.environ)
    from vllm.platforms import current_platform

    with _listening() as said:
        config = _config_of(model)
        chosen = runner_of(config)
    if wish is not None:
        return (judged(vllm, "", chosen, f"{SWITCH}={os.environ[SWITCH]}"),)
    device = str(current_platform.device_type)
    found = [judged(vllm, device, chosen, _by_model(config, said))]
    if device == "cpu":
        found.append(_on_a_gpu(vllm, config))
    return tuple(found)


def _on_a_gpu(vllm: str, config: Any) -> RunnerFound:
    with _with_triton(), _listening() as said:
        chosen = runner_of(config)
    return judged(vllm, "cuda", chosen, _by_model(config, said), is_here=False)


def _by_model(config: Any, said: list[str]) -> str:
    names = ", ".join(config.model_config.architectures)
    return f"vLLM's choice for {names}" + "".join(f": {reason.rstrip('.')}" for reason in said[-1:])


def _config_of(model: str) -> Any:
    """vLLM's configuration for a model, as ``vllm serve MODEL`` makes it."""
    try:
        from vllm.engine.arg_utils import EngineArgs

        if "://" in model:
            # vLLM downloads from these even if the hub is offline.
            raise ValueError("this is an address")
        return EngineArgs(model=model).create_engine_config()
    except Exception as error:
        reason = " ".join(str(error).split())
        raise Refused(
            found=f"vLLM cannot make a configuration for {model!r}: {type(error).__name__}: {reason}",
            expected="a model whose config.json is on this machine, as a folder or by a name in Hugging Face's cache, "
            "and settings that vLLM accepts for it",
            consequence="The model runner for this model is unknown.",
            remedy="Fix what vLLM reports, or give the folder of a model that it serves.",
        ) from error


def runner_of(config: Any) -> str:
    """The model runner of a vLLM configuration, "V1" or "V2": vLLM's own answer, which its workers use as well.

    Raises:
        ContractChanged: a VllmConfig without that answer.
    """
    return named(bool(private(config, "use_v2_model_runner")))


@contextlib.contextmanager
def _listening() -> Iterator[list[str]]:
    """Collect what vLLM logs about its choice inside the ``with``. vLLM logs each sentence once per process."""
    said: list[str] = []

    class Ear(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            reason = record.getMessage()
            if "v1 model runner" in reason.lower():
                said.append(reason)

    logger, ear = logging.getLogger(_CONFIG), Ear()
    logger.addHandler(ear)
    try:
        yield said
    finally:
        logger.removeHandler(ear)


@contextlib.contextmanager
def _with_triton() -> Iterator[None]:
    """Make vLLM's configuration assume Triton inside the ``with``. Changes a module: only for a separate process."""
    names = vars(importlib.import_module(_CONFIG))
    before = names[_TRITON]
    names[_TRITON] = True
    try:
        yield
    finally:
        names[_TRITON] = before
