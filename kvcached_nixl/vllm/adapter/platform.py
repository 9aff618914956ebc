# SPDX-License-Identifier: Apache-2.0
"""What vLLM and kvcached detect on this host, and choose there: device, memory, pages, side channel, and the model
runner of a model. Imports both; starts nothing.

Sources: vLLM's ``engine/arg_utils.py`` and ``config/vllm.py`` (``VllmConfig.use_v2_model_runner``),
``v1/nixl/base_worker.py``.
"""

from __future__ import annotations

import contextlib
import importlib
import logging
import os
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from logging.handlers import BufferingHandler
from typing import Any

from kvcached_nixl.errors import Refused
from kvcached_nixl.side_channel_address import PORT, SideChannelAddress
from kvcached_nixl.vllm.adapter.attributes import private
from kvcached_nixl.vllm.adapter.locate import METADATA_MODULE
from kvcached_nixl.vllm.adapter.versions import SWITCH, RunnerFound, accepted, judged, named, outlook, stated

_CONFIG = "vllm.config.vllm"
_TRITON = "HAS_TRITON"


@dataclass(frozen=True)
class Platform:
    """Attributes:
    device: vLLM's name of the kind of device.
    memory_type: NIXL's memory type of the KV cache on that device.
    runner: vLLM's model runner, V1 or V2.
    page_bytes: size of kvcached's pages of physical memory.
    is_contiguous: kvcached keeps all layers of a block side by side.
    """

    device: str
    memory_type: str
    runner: str
    page_bytes: int
    is_contiguous: bool


def platform() -> Platform:
    """Source of the memory type: ``v1/nixl/base_worker.py``."""
    from kvcached import utils
    from vllm import envs

    # This import sets environment variables of UCX, on which a proof depends.
    importlib.import_module(METADATA_MODULE)
    from vllm.platforms import current_platform

    device = str(current_platform.device_type)
    stock = current_platform.get_nixl_memory_type()
    return Platform(
        device=device,
        memory_type=stock or ("DRAM" if device == "cpu" else "VRAM"),
        runner=named(envs.VLLM_USE_V2_MODEL_RUNNER),
        page_bytes=int(utils.PAGE_SIZE),
        is_contiguous=bool(utils.CONTIGUOUS_LAYOUT),
    )


def device_name(data_parallel_rank: int) -> str | None:
    """Identifies the device whose memory an engine's kvcached measures: the one of its first rank. None if it is not
    known: which device another data-parallel rank of this host uses is decided in its workers (vLLM 0.33).

    Raises:
        Exception: of the driver's library, or the platform does not identify its devices.
    """
    from vllm.platforms import current_platform

    return None if data_parallel_rank else str(current_platform.get_device_uuid(0))


def side_channel_address(index: int = 0) -> SideChannelAddress:
    """The side channel of a data-parallel rank, as this process's environment configures it.

    Raises:
        SettingsError: it cannot be used.
    """
    from vllm import envs
    from vllm.utils.network_utils import get_ip

    host = str(private(envs, "VLLM_NIXL_SIDE_CHANNEL_HOST"))
    return SideChannelAddress.of(host, _port(), index, os.environ, get_ip)


def _port() -> int | str:
    """The port; if vLLM cannot read it as a number, the text, which `SideChannelAddress.of` refuses."""
    from vllm import envs

    try:
        return int(private(envs, "VLLM_NIXL_SIDE_CHANNEL_PORT"))
    except ValueError:
        return os.environ[PORT]


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
        with _with_triton(), _listening() as said:
            there = runner_of(config)
        found.append(judged(vllm, "cuda", there, _by_model(config, said), is_here=False))
    return tuple(found)


def _by_model(config: Any, said: list[logging.LogRecord]) -> str:
    reasons = [text for one in said if "v1 model runner" in (text := one.getMessage()).lower()]
    names = ", ".join(config.model_config.architectures)
    return f"vLLM's choice for {names}" + "".join(f": {reason.rstrip('.')}" for reason in reasons[-1:])


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
def _listening() -> Iterator[list[logging.LogRecord]]:
    """Collect what vLLM logs inside the ``with``. vLLM logs each sentence once per process."""
    logger, ear = logging.getLogger(_CONFIG), BufferingHandler(sys.maxsize)
    logger.addHandler(ear)
    try:
        yield ear.buffer
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
