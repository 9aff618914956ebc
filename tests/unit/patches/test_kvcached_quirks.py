# SPDX-License-Identifier: Apache-2.0
"""What this package changes of kvcached: version windows that open by proof only, and functions for later vLLMs."""

from __future__ import annotations

import re
import types
from collections.abc import Callable
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest

from kvcached_nixl.errors import Refused
from kvcached_nixl.patching import Call, Patch, parameter_lists
from kvcached_nixl.vllm.patches import windows
from kvcached_nixl.vllm.patches.kvcached_quirks import (
    patch_allocate_slots,
    patch_coordinator,
    patch_worker_init_device,
    resize,
)
from kvcached_nixl.vllm.patches.windows import PATCH_NAMES, Contact, Windows, differences

GIB = 1 << 30
SNAPSHOT, CACHE = SimpleNamespace(total_memory=80 * GIB), SimpleNamespace(gpu_memory_utilization=0.5)


def patched(patch: Patch, target: Any, apply: Callable[[], bool]) -> Any:
    """As where kvcached patches a module of vLLM: ``apply``."""
    return patch.wrapper(Call(lambda gpuworker_mod=None, kvcoord_mod=None: apply(), None, (target, target), {}))


def module(**contents: Any) -> Any:
    made = types.ModuleType("patched")
    vars(made).update(contents)
    return made


def gpu_worker() -> Any:
    """vLLM 0.32's."""

    def request_memory(init_snapshot: Any, cache_config: Any, external_weight_memory: int = 0) -> int:
        raise AssertionError("kvcached replaces it")

    return module(request_memory=request_memory)


def kvcached_request_memory(init_snapshot: Any, cache_config: Any) -> int:
    return int(init_snapshot.total_memory * cache_config.gpu_memory_utilization)


def test_external_weights_are_not_the_engines_to_use() -> None:
    worker = gpu_worker()

    def apply() -> bool:
        worker.request_memory = kvcached_request_memory
        return True

    assert patched(patch_worker_init_device, worker, apply) is True
    assert worker.request_memory(SNAPSHOT, CACHE) == 40 * GIB
    assert worker.request_memory(SNAPSHOT, CACHE, 0) == 40 * GIB
    assert worker.request_memory(SNAPSHOT, CACHE, 15 * GIB) == 25 * GIB
    assert worker.request_memory(SNAPSHOT, CACHE, external_weight_memory=15 * GIB) == 25 * GIB
    for too_many in (40 * GIB, 41 * GIB):
        with pytest.raises(Refused, match="gpu_memory_utilization 0.5") as refused:
            worker.request_memory(SNAPSHOT, CACHE, too_many)
        assert str(too_many) in refused.value.found and str(40 * GIB) in refused.value.found


def test_what_kvcached_leaves_is_left() -> None:
    """kvcached says that it has patched the module before, or that it cannot."""
    worker = gpu_worker()
    stock = worker.request_memory
    for answer in (True, False):
        assert patched(patch_worker_init_device, worker, lambda answer=answer: answer) is answer  # type: ignore[misc]
        assert worker.request_memory is stock


def coordinators() -> tuple[Any, Callable[[], bool]]:
    """vLLM 0.33's class of coordinators with its subclass, and kvcached's patch, which replaces the block pool."""

    class KVCacheCoordinator:
        def __init__(
            self,
            kv_cache_config: str,
            use_eagle: bool,
            num_hash_lookahead_tokens: int = 0,
            enable_kv_cache_events: bool = False,
        ) -> None:
            self.block_pool = SimpleNamespace(num_hash_lookahead_tokens=num_hash_lookahead_tokens)

    class Unitary(KVCacheCoordinator):
        def __init__(self, kv_cache_config: str, use_eagle: bool, num_hash_lookahead_tokens: int = 0) -> None:
            super().__init__(kv_cache_config, use_eagle, num_hash_lookahead_tokens=num_hash_lookahead_tokens)

    made = module(KVCacheCoordinator=KVCacheCoordinator, Unitary=Unitary)
    stock = KVCacheCoordinator.__init__

    def init(self: Any, *args: Any, **kwargs: Any) -> None:
        stock(self, *args, **kwargs)
        self.block_pool = SimpleNamespace()

    def apply() -> bool:
        KVCacheCoordinator.__init__ = init  # type: ignore[method-assign]
        return True

    return made, apply


@pytest.mark.parametrize("name", ["KVCacheCoordinator", "Unitary"])
def test_kvcacheds_block_pool_has_the_lookahead(name: str) -> None:
    made, apply = coordinators()
    assert patched(patch_coordinator, made, apply)
    assert getattr(made, name)("config", False).block_pool.num_hash_lookahead_tokens == 0
    assert getattr(made, name)("config", True, 3).block_pool.num_hash_lookahead_tokens == 3
    assert getattr(made, name)("config", use_eagle=True, num_hash_lookahead_tokens=2).block_pool == SimpleNamespace(
        num_hash_lookahead_tokens=2
    )


def test_kvcached_patches_the_allocation_as_where_it_undoes_one() -> None:
    """And nothing else: the version is vLLM's again also if the patch raises."""
    patch, seen = SimpleNamespace(detected_version="0.26.0"), []

    def apply() -> bool:
        seen.append(patch.detected_version)
        if len(seen) > 1:
            raise RuntimeError
        return True

    assert patch_allocate_slots.wrapper(Call(apply, patch, (), {})) is True
    with pytest.raises(RuntimeError):
        patch_allocate_slots.wrapper(Call(apply, patch, (), {}))
    assert seen == ["0.28.0", "0.28.0"] and patch.detected_version == "0.26.0"


@pytest.mark.parametrize(("limit", "applied"), [(0, 0), (8, 8), (9, 8)])
def test_a_limit_is_kept_within_the_pool(limit: int, applied: int) -> None:
    def stock(new_mem_size: int) -> bool:
        return new_mem_size == applied

    assert resize.wrapper(Call(stock, SimpleNamespace(mem_size=8), (limit,), {}))


OF_RUNNER = ">=0.29.0,<0.31.0"


@dataclass
class VersionRange:
    """kvcached's, for two numbers."""

    range_spec: str

    def contains(self, version: str) -> bool:
        least, _, end = self.range_spec.partition(",")
        number = float(version[:4])
        return number >= float(least[2:6]) and (not end or number < float(end[1:5]))


@pytest.fixture
def installed(monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    found = {"kvcached": "0.1.6", "vllm": "0.31.0"}
    monkeypatch.setattr(windows, "found_version", found.get)
    monkeypatch.setattr(windows, "differences", list)
    return found


def applied(made: Windows, **results: bool) -> list[bool]:
    """Whether kvcached's window contained 0.31.0 while it patched vLLM."""
    seen: list[bool] = []

    def apply() -> dict[str, bool]:
        seen.append(made.contains(VersionRange(OF_RUNNER), "0.31.0"))
        return {
            name: results.get(name, True) for name in PATCH_NAMES if name not in results or results[name] is not None
        }

    made.while_patched("vllm", apply)
    return seen


def test_they_are_open_while_kvcached_patches_and_stay_so(installed: dict[str, str]) -> None:
    made = Windows()
    assert not made.contains(VersionRange(OF_RUNNER), "0.31.0"), "before, nothing is known"
    assert applied(made) == [True]
    assert made.is_open and made.refusal is None
    for specifier in (OF_RUNNER, ">=0.28.0,<0.31.0", ">=0.26.0,<0.31.0"):
        assert made.contains(VersionRange(specifier), "0.31.0")
    # An earlier version than the window's first is still outside, and so are all other ranges.
    assert not made.contains(VersionRange(OF_RUNNER), "0.28.0")
    for specifier in (">=0.9.0,<0.29.0", ">=0.28.0,<0.29.0", "<0.28.0", ">=0.29.0,<0.32.0"):
        assert not made.contains(VersionRange(specifier), "0.31.0")


@pytest.mark.parametrize("name", PATCH_NAMES)
@pytest.mark.parametrize("result", [False, None], ids=["failed", "missing"])
def test_a_patch_that_was_not_applied_shuts_them(installed: dict[str, str], name: str, result: bool | None) -> None:
    """kvcached itself only warns."""
    made = Windows()
    assert applied(made, **{name: result}) == [True]  # type: ignore[arg-type]
    assert not made.is_open and not made.contains(VersionRange(OF_RUNNER), "0.31.0")
    assert made.refusal is not None and f"kvcached's patch {name!r} was not applied" in made.refusal.found


def test_what_differs_keeps_them_shut(
    installed: dict[str, str], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Said before kvcached refuses the engine, in four lines."""
    monkeypatch.setattr(windows, "differences", lambda: ["vllm.v1.engine.core.EngineCore.shutdown: parameters ()"])
    made = Windows()
    assert applied(made) == [False] and not made.is_open
    (line,) = [record.getMessage() for record in caplog.records]
    assert "vLLM 0.31.0, in which vllm.v1.engine.core.EngineCore.shutdown: parameters ()" in line
    assert line.startswith("kvcached's version windows stay shut:") and len(line.splitlines()) == 1 + 4
    assert "ends the engine at its start" in line


def test_another_kvcached_keeps_them_shut(installed: dict[str, str]) -> None:
    installed["kvcached"] = "0.1.7"
    made = Windows()
    assert applied(made) == [False] and not made.is_open
    assert made.refusal is not None and "kvcached 0.1.7; expected 0.1.6" in made.refusal.found


def test_patches_that_raise_shut_them(installed: dict[str, str]) -> None:
    made = Windows()

    def apply() -> dict[str, bool]:
        raise RuntimeError("planted")

    with pytest.raises(RuntimeError, match="planted"):
        made.while_patched("vllm", apply)
    assert not made.is_open and not made.contains(VersionRange(OF_RUNNER), "0.31.0")


def test_another_library_is_patched_as_without_this_package() -> None:
    made = Windows()
    assert made.while_patched("sglang", lambda: {"a": False}) == {"a": False}
    assert not made.is_open and made.refusal is None


# ------------------------------------------------------------------------------------------------------------- contacts


def given(self: object, one: int, *, two: int = 2) -> None:
    """A contact."""


class Owner:
    method = given
    of_class = classmethod(given)
    described = property(given)


@pytest.mark.parametrize(
    ("qualname", "parameters", "found"),
    [
        ("Owner.method", "self one two", ""),
        ("Owner.of_class", "self one two", ""),
        ("function", "self one two", ""),
        ("function", "self one two?", ""),
        ("function", "self one", r"parameters \(self, one, two\); expected \(self, one\)"),
        ("function", "self two one", "parameters"),
        ("Owner.gone", "self", "AttributeError"),
        ("gone", "self", "AttributeError"),
        ("number", "self", "TypeError"),
        ("Owner.described", "self", "TypeError"),
    ],
)
def test_a_contact_that_differs_is_found(
    qualname: str,
    parameters: str,
    found: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    module = types.ModuleType("contacted")
    vars(module).update(Owner=Owner, function=given, number=1)
    monkeypatch.setitem(__import__("sys").modules, "contacted", module)
    monkeypatch.setattr(windows, "CONTACTS", (Contact("contacted", qualname, parameter_lists(parameters)),))
    said = differences()
    assert bool(said) is bool(found)
    assert not found or re.match(rf"contacted\.{qualname}: .*{found}", said[0])


def test_a_module_that_is_gone_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(windows, "CONTACTS", (Contact("no_such_module_here", "a", ()),))
    assert differences() == ["no_such_module_here.a: ModuleNotFoundError: No module named 'no_such_module_here'"]
