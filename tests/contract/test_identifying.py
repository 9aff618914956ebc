# SPDX-License-Identifier: Apache-2.0
"""Calls from outside may change weights: these are read again before the next step, and once for many calls.

vLLM's own loop, with an executor that counts. A trainer may make a call for each tensor, and wait for each of them. And
which of vLLM's loaders are believed.
"""

from __future__ import annotations

import queue
import re
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
from support.patches import applied
from vllm import envs
from vllm.model_executor.model_loader import _LOAD_FORMAT_TO_MODEL_LOADER
from vllm.model_executor.model_loader.default_loader import DefaultModelLoader
from vllm.v1.engine import EngineCoreRequestType
from vllm.v1.engine.core import EngineCoreProc, EngineShutdownState
from vllm.v1.worker.gpu_worker import Worker

from kvcached_nixl.vllm.adapter import weights as adapter_weights
from kvcached_nixl.vllm.adapter.computes import BY_ENVIRONMENT
from kvcached_nixl.vllm.adapter.weights import distrust, look_again
from kvcached_nixl.vllm.patches import engine_loop, weights


@pytest.fixture(autouse=True)
def patched() -> Iterator[None]:
    with applied((engine_loop.process_input_queue, weights.collective_rpc)):
        yield


METADATA = {(0, 1): None}
"""Of the second rank."""


class Executor:
    """Notes what is asked of the workers, in order."""

    is_sleeping = False
    second: object = METADATA
    """What the second rank answers to a look."""

    def __init__(self) -> None:
        self.asked: list[str] = []

    def collective_rpc(self, method: Any, timeout: Any = None, args: Any = (), kwargs: Any = None) -> list[Any]:
        if method is not look_again:
            self.asked.append(method)
            return [None, None]
        self.asked.append(f"identify after {', '.join(*args)}")
        return [{(0, 0): None}, self.second]


class Side:
    """What this package is in an engine."""

    due_in_seconds = None
    pending = ()

    are_fetchable = False

    def __init__(self, asked: list[str]) -> None:
        self._asked = asked

    def bind_wake(self, wake: Any) -> None: ...

    @property
    def revocations(self) -> Side:
        return self

    side_channel = engine = offering = kept = revocations

    def hide(self) -> None:
        self._asked.append("hide")

    def weights_doubted(self, *, has_changed: bool) -> None:
        self._asked += ["revoke"] if has_changed else []


def take_input(core: Any) -> None:
    """What vLLM's loop does before each step."""
    getattr(core, engine_loop.process_input_queue.attribute)()


class Engine:
    """vLLM's engine core around an executor that counts. It has work as soon as every call is answered, or always."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *, is_idle: bool) -> None:
        self.core = core = object.__new__(EngineCoreProc)
        core.model_executor = Executor()
        heard = SimpleNamespace(set_xfer_handshake_metadata_pp_aware=lambda found: self.heard.append(sorted(found)))
        core.scheduler, self.heard = SimpleNamespace(connector=heard), list[Any]()
        core.input_queue, core.output_queue = queue.Queue[Any](), queue.Queue[Any]()
        core.aborts_queue = queue.Queue[Any]()
        vars(core).update(_idle_state_callbacks=[])
        core.process_input_queue_block, core.shutdown_state = True, EngineShutdownState.RUNNING
        core.has_work = lambda: not is_idle or core.input_queue.empty() and bool(self.asked)
        self.asked: list[str] = core.model_executor.asked
        self.side = side = Side(self.asked)
        for module, name in ((engine_loop, "bound_sides"), (weights, "sides")):
            monkeypatch.setattr(module, name, lambda _: [side])
        monkeypatch.setattr(engine_loop, "rest", lambda *_: None)

    def call(self, *methods: str) -> list[str]:
        """What is asked of the workers until vLLM takes the next step, after these calls at once."""
        for number, method in enumerate(methods):
            self.core.input_queue.put((EngineCoreRequestType.UTILITY, (0, number, "collective_rpc", (method,))))
        take_input(self.core)
        for _ in methods:
            self.core.output_queue.get_nowait()
        assert self.core.output_queue.empty(), "every call is answered once"
        asked, self.asked[:] = list(self.asked), []
        return asked


TOGETHER = (
    (("one",), ["one", "identify after one"]),
    (("one", "two", "one"), ["one", "two", "one", "identify after one, two, one"]),
)
"""Calls that wait together, and what is asked of the workers: weights are read once for all of them, each by name."""
CALLS: dict[str, tuple[tuple[tuple[str, ...], list[str]], ...]] = {
    "in an idle engine": TOGETHER,
    "in one that is never idle": TOGETHER,
    "what sleeps without a word to the executor is not read": (
        (("one", "sleep"), ["one", "sleep", "hide"]),
        (("wake_up",), ["wake_up", "identify after one, wake_up"]),
    ),
    "calls that change no weights cost nothing": ((("profile", "list_loras"), ["profile", "list_loras"]),),
    "weights that are known to change are revoked at once": (
        (("update_weights", "two"), ["update_weights", "revoke", "two", "identify after update_weights, two"]),
    ),
    "sleeping weights are not read": ((("one", "two"), ["one", "revoke", "two", "revoke"]),),
}
NEVER_IDLE = ("in one that is never idle", "weights that are known to change are revoked at once")


@pytest.mark.parametrize("what", CALLS)
def test_what_is_asked_of_workers_before_the_next_step(what: str, monkeypatch: pytest.MonkeyPatch) -> None:
    sleeps = what == "sleeping weights are not read"
    engine = Engine(monkeypatch, is_idle=not sleeps and what not in NEVER_IDLE)
    engine.core.model_executor.is_sleeping = sleeps
    for methods, asked in CALLS[what]:
        assert engine.call(*methods) == asked


def test_what_peers_may_fetch_is_looked_at_before_the_call_returns(monkeypatch: pytest.MonkeyPatch) -> None:
    """Who has called may ask them at once; and once for several calls."""
    engine = Engine(monkeypatch, is_idle=True)
    engine.side.are_fetchable = True
    assert engine.core.collective_rpc("one") == [None, None]
    take_input(engine.core)
    engine.core.collective_rpc("one")
    assert engine.asked[-1:] == ["identify after one"]
    engine.asked.clear()
    assert engine.call("one", "two") == ["one", "two", "identify after one, two"]


def test_a_call_that_fails_may_have_changed_weights_in_part(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = Engine(monkeypatch, is_idle=True)
    engine.side.are_fetchable = True
    called = engine.core.model_executor.collective_rpc

    def fail(method: Any, *rest: Any, **named: Any) -> list[None]:
        if method == "one":
            raise ValueError(method)
        return list(called(method, *rest, **named))

    monkeypatch.setattr(engine.core.model_executor, "collective_rpc", fail)
    with pytest.raises(ValueError, match="one"):
        engine.core.collective_rpc("one")
    assert engine.asked == ["identify after one (failed)"]


def test_calls_that_were_not_looked_at_are_looked_at_later(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = Engine(monkeypatch, is_idle=True)
    engine.side.are_fetchable = True
    engine.core.model_executor.second = "a worker is busy"
    assert engine.call("one") == ["one", "identify after one", "hide"]
    engine.core.model_executor.second = METADATA
    assert engine.call("two") == ["two", "identify after two"], "every rank knows of the other one"


@pytest.mark.parametrize("failure", ["torch.OutOfMemoryError", None], ids=["no memory", "answers another call"])
def test_a_look_that_has_failed_is_repeated(monkeypatch: pytest.MonkeyPatch, failure: object) -> None:
    """Nobody may call again: a neighbour had taken the memory that workers need for it. A rank that has answered would
    take a reload of which it hears again for one that it knows nothing of."""
    engine, now = Engine(monkeypatch, is_idle=False), [0.0]
    monkeypatch.setattr(weights, "time", SimpleNamespace(monotonic=lambda: now[0]))
    engine.core.model_executor.second = failure
    assert engine.call("one") == ["one", "identify after one", "hide"]
    assert engine.call() == []
    now[0] = weights.RETRY_SECONDS
    assert engine.call() == ["identify after "], "in vain, and nobody is told again"
    assert not engine.heard
    engine.core.model_executor.second = METADATA
    now[0] = 2 * weights.RETRY_SECONDS
    assert engine.call() == ["identify after "] and engine.heard == [[(0, 0), (0, 1)]]
    now[0] = 4 * weights.RETRY_SECONDS
    assert engine.call() == []


def test_a_worker_whose_weights_cannot_be_read_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    """If it raised, vLLM's executor would take what the other ranks answer for the next step's outputs."""
    worker, model = SimpleNamespace(get_kv_connector_handshake_metadata=lambda: 1 // 0), SimpleNamespace()
    monkeypatch.setattr(adapter_weights, "_models", lambda _: {"": model})
    assert look_again(worker, ["one"]).startswith("ZeroDivisionError")
    assert adapter_weights._history(model)._called == ["one"], "for when they can be"


def test_a_call_while_an_engine_starts_is_let_through(monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM tells its workers an automatic max_model_len before it has a scheduler."""
    engine = Engine(monkeypatch, is_idle=False)
    del engine.core.scheduler
    assert engine.core.collective_rpc("update_max_model_len") == [None, None] and engine.asked == [
        "update_max_model_len"
    ]


def test_a_loader_is_believed_if_vllm_s_base_class_says_when_it_loads() -> None:
    """Others map the memory of another process, or fill what a loader has left."""

    class Merging(DefaultModelLoader):
        """Of another package."""

    by_themselves = {cls.__name__ for cls in _LOAD_FORMAT_TO_MODEL_LOADER.values() if distrust(cls)}
    assert by_themselves - {"IpcModelLoader"} == {"ModelExpressModelLoader", "TensorizerLoader"}
    assert ("IpcModelLoader" in by_themselves) == ("ipc_cache" in _LOAD_FORMAT_TO_MODEL_LOADER)
    assert "Merging may put other weights in place" in distrust(Merging)


@pytest.mark.parametrize("is_idle", [True, False])
def test_other_input_that_waits_does_not_put_it_off(monkeypatch: pytest.MonkeyPatch, is_idle: bool) -> None:
    """Whoever called is told that the call has ended, and may ask peers at once."""
    engine = Engine(monkeypatch, is_idle=is_idle)
    for item in (
        (EngineCoreRequestType.UTILITY, (0, 1, "collective_rpc", ("one",))),
        (EngineCoreRequestType.WAKEUP, None),
        (EngineCoreRequestType.UTILITY, (0, 2, "is_sleeping", ())),
    ):
        engine.core.input_queue.put(item)
    take_input(engine.core)
    assert engine.asked == ["one", "identify after one"]


OTHERS = frozenset(
    {
        *("add_lora", "apply_model", "checkpoint_restore", "compile_or_warm_up_model", "determine_available_memory"),
        *("discard", "elastic_ep_execute", "execute_dummy_batch", "execute_model", "get_draft_model"),
        *("get_kv_connector_handshake_metadata", "get_model", "handle_ft_command", "init_device"),
        *("initialize_from_config", "randomize_dummy_inputs", "remove_lora", "reset_weights", "sample_tokens"),
        *("set_kv_cache_layout", "shutdown", "sleep", "take_draft_token_ids", "update_config", "wake_up"),
    }
)
"""Methods of vLLM's workers that may change weights, or that nobody calls by name from outside."""


def test_every_call_of_a_worker_was_judged() -> None:
    """After one that was not, weights that cannot all be read count as unknown until they are loaded again: a call that
    only reads would end hand-overs (``POST /weight_checker``)."""
    found = {name for name in dir(Worker) if not name.startswith("_")}
    assert found <= OTHERS | weights._HARMLESS | weights._CHANGING
    assert not OTHERS & (weights._HARMLESS | weights._CHANGING)


OF_SOME_SERIES = {
    *("VLLM_TEST_FORCE_FP8_MARLIN", "VLLM_ROCM_USE_AITER_MOE_SITUV2_A8W4", "VLLM_ROCM_USE_AITER_MOE_SITUV2"),
    *("VLLM_ROCM_USE_AITER_MOE_A4W4_DSV4", "VLLM_ROCM_MUSE_MOE_ONLINE_QUANT", "VLLM_ROCM_MUSE_MOE_REDUCE_DTYPE"),
    *("VLLM_B12X_MOE_FP4_FORCE_A16", "VLLM_FLASHINFER_MOE_A2A_LOW_PRECISION_COMBINE", "VLLM_XPU_INC_WNA16_BACKEND"),
}
SOUNDS_LOSSY = re.compile(r"QUANT|DTYPE|FP8|FP4|INT8|INT4|MXFP|SCALE|ROUND|PRECISION|ACCUM|A\d+W\d|WNA16|A16$")
LOSES_NOTHING = {
    # Kernels and layouts for the same precision, when numbers are dequantized, and how many bytes or tokens.
    *("VLLM_MXFP4_EMULATION_DEQUANT_AT_LOAD", "VLLM_MXFP8_EMULATION_DEQUANT_AT_LOAD", "VLLM_ROCM_FP8_PADDING"),
    *("VLLM_ROCM_USE_AITER_FP4_ASM_GEMM", "VLLM_USE_DEEP_GEMM_TMA_ALIGNED_SCALES", "VLLM_USE_FLASHINFER_MOE_INT4"),
    *("VLLM_BLOCKSCALE_FP8_GEMM_FLASHINFER", "VLLM_MAX_TOKENS_PER_EXPERT_FP4_MOE"),
    *("VLLM_ROCM_QUICK_REDUCE_CAST_BF16_TO_FP16", "VLLM_ROCM_QUICK_REDUCE_QUANTIZATION_MIN_SIZE_KB"),
    # What is sent to experts is quantized as they would quantize it themselves.
    "VLLM_DEEPEPLL_NVFP4_DISPATCH",
    # Of scales that an engine computes, which are refused; of experts' processes.
    *("Q_SCALE_CONSTANT", "K_SCALE_CONSTANT", "V_SCALE_CONSTANT", "VLLM_ELASTIC_EP_SCALE_UP_LAUNCH"),
}


def test_every_variable_that_may_change_what_is_computed_was_judged() -> None:
    """Quantization behind loading, which neither the model's configuration nor its files show."""
    found = {*envs.environment_variables}
    assert BY_ENVIRONMENT - found <= OF_SOME_SERIES
    assert {name for name in found if SOUNDS_LOSSY.search(name)} <= BY_ENVIRONMENT | LOSES_NOTHING
    assert not BY_ENVIRONMENT & LOSES_NOTHING
