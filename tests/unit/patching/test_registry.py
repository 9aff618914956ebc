# SPDX-License-Identifier: Apache-2.0
"""`kvcached_nixl.patching`: contract, wrapping, three outcomes, exact restore."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import wrapt

from kvcached_nixl.errors import ContractChanged, Refused
from kvcached_nixl.patching import ANY_PARAMETERS, Call, Patch, PatchState, Registry, Target

SOURCE = """
class Base:
    def load(self, request, *, count=1, **more):
        return ["base", request, count, more]
    @classmethod
    def layout(cls, config):
        return cls.__name__ + config
    @staticmethod
    def size(blocks):
        return blocks
    @property
    def depth(self):
        return 3

class Sub(Base):
    def load(self, request, *, count=1, **more):
        return ["sub"] + super().load(request, count=count, **more)

def digest(config, backend):
    return config + backend
"""


def patch(attribute: str = "load", **changes: Any) -> Patch:
    """A complete record; ``changes`` replace fields."""
    fields: dict[str, Any] = {
        "target": Target("worker", "lib.worker", "Base"),
        "attribute": attribute,
        "process": "worker",
        "parameters": "self request count more",
        "why": "blocks would be read twice.",
    }
    return Patch(**{**fields, **changes})


LAYOUT = {"attribute": "layout", "kind": "classmethod", "parameters": "cls config"}


def registered(*items: Patch, **options: Any) -> Registry:
    registry = Registry(**options)
    registry.add(items)
    return registry


def only(registry: Registry) -> Any:
    (outcome,) = registry.outcomes()
    return outcome


@pytest.fixture
def lib(make_module: Callable[..., Any]) -> Any:
    make_module("lib")
    return make_module("lib.worker", SOURCE)


def test_an_inherited_method_is_wrapped_where_it_is_defined(lib: Any) -> None:
    """Both subclasses of the owner are covered, and nothing is pinned on a subclass."""
    target = Target("worker", "lib.worker", "Sub")
    registered(patch(target=target, **LAYOUT, wrapper=lambda call: "wrapped " + call.proceed()))
    assert lib.Base.layout("!") == "wrapped Base!"
    assert lib.Sub.layout("!") == "wrapped Sub!"
    assert "layout" not in vars(lib.Sub)


def test_an_attribute_inherited_from_outside_the_target_is_refused(lib: Any, make_module: Callable[..., Any]) -> None:
    """A patch never lands on a base class that is shared with other connectors."""
    make_module("other", "from lib.worker import Base\nclass Mine(Base): pass")
    registry = registered(patch(target=Target("mine", "other", "Mine"), wrapper=lambda call: None))
    assert only(registry).state is PatchState.REFUSED
    assert "inherited from lib.worker.Base" in only(registry).reason
    assert "load" in vars(lib.Base) and type(vars(lib.Base)["load"]).__name__ == "function"


DIGEST = {
    "attribute": "digest",
    "kind": "function",
    "target": Target("module", "lib.worker"),
    "parameters": "config backend",
}


@pytest.mark.parametrize(
    ("changes", "use", "result"),
    [
        (LAYOUT, lambda lib: lib.Sub.layout("!"), "Sub!"),
        ({"attribute": "size", "kind": "staticmethod", "parameters": "blocks"}, lambda lib: lib.Sub.size("!"), "!"),
        ({"attribute": "depth", "kind": "property", "parameters": "self"}, lambda lib: lib.Base().depth, 3),
        (DIGEST, lambda lib: lib.digest("a", "b"), "ab"),
    ],
    ids=["class", "static", "property", "function"],
)
def test_each_kind_is_wrapped_and_comes_back_identical(
    lib: Any, changes: dict[str, Any], use: Callable[[Any], Any], result: object
) -> None:
    """The very object from the dictionary is put back; a classmethod restored by getattr would be bound."""
    owner = lib if changes is DIGEST else lib.Base
    before = vars(owner)[changes["attribute"]]
    registry = registered(patch(**changes, wrapper=lambda call: [call.proceed()]))
    assert use(lib) == [result]
    assert registry.uninstall() == ()
    assert vars(owner)[changes["attribute"]] is before and use(lib) == result


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"parameters": "self request"}, "parameters (self, request, count, more)"),
        ({"kind": "classmethod"}, "a method"),
        ({"attribute": "lode"}, "no such attribute"),
        ({"attribute": "depth", "parameters": "self"}, "a property"),
        ({"attribute": "__doc__", "parameters": "self"}, "NoneType"),
    ],
)
def test_a_changed_contract_is_refused_before_anything_is_wrapped(
    lib: Any, changes: dict[str, Any], words: str
) -> None:
    """The refusal names what was found and says what would follow."""
    before = dict(vars(lib.Base))
    registry = registered(patch(**changes, wrapper=lambda call: None))
    outcome = only(registry)
    assert outcome.state is PatchState.REFUSED
    assert isinstance(outcome.cause, ContractChanged)
    assert words in outcome.cause.found
    assert "blocks would be read twice" in outcome.cause.consequence
    assert dict(vars(lib.Base)) == before


@pytest.mark.parametrize("parameters", ["self request count? more?", ANY_PARAMETERS])
def test_other_parameters_are_accepted_if_the_record_says_so(lib: Any, parameters: str) -> None:
    """Two supported versions may differ in them; the gate must not be opened by a changed signature."""
    registry = registered(patch(parameters=parameters, wrapper=lambda call: call.argument("request")))
    assert only(registry).state is PatchState.APPLIED
    assert lib.Base().load("r") == "r"


def test_a_target_that_is_nowhere_is_refused(lib: Any) -> None:
    """A class that was renamed away, and a library that is not there."""
    targets = [Target("gone", "lib.worker", "Gone"), Target("nowhere", "no.such.module", "Gone")]
    registry = registered(*(patch(target=one, wrapper=lambda call: None) for one in targets))
    registry.complete()
    one, two = registry.outcomes()
    assert one.state is two.state is PatchState.REFUSED
    assert "no gone in lib.worker.Gone" in one.reason and "no.such.module.Gone" in two.reason


def test_a_target_whose_import_breaks_is_refused_with_that_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An ImportError from inside the module is not taken for the module's absence."""
    (tmp_path / "broken_library.py").write_text("import a_module_nobody_has")
    monkeypatch.syspath_prepend(str(tmp_path))
    record = patch(target=Target("broken", "broken_library", "Base"))
    registry = registered(replace(record, wrapper=lambda call: None))
    registry.complete()
    assert only(registry).state is PatchState.REFUSED
    assert "a_module_nobody_has" in only(registry).reason


def test_a_class_that_is_only_re_exported_is_not_the_target(lib: Any, make_module: Callable[..., Any]) -> None:
    """An alias of a subclass is no stand-in for a base that is gone: its siblings would stay unpatched, unseen."""
    make_module("lib.facade", "from lib.worker import Sub as Base")
    registry = registered(patch(target=Target("worker", "lib.facade", "Base"), wrapper=lambda call: None))
    registry.complete()
    assert only(registry).state is PatchState.REFUSED
    assert type(vars(lib.Sub)["load"]).__name__ == "function"


@pytest.mark.parametrize("absent", ["Base", "digest"])
def test_a_half_imported_module_is_left_until_it_is_complete(lib: Any, absent: str) -> None:
    """The class or function may not be there yet; that is no reason to refuse."""
    record = patch(**DIGEST) if absent == "digest" else patch()
    entire = vars(lib).pop(absent)
    lib.__spec__._initializing = True
    registry = registered(replace(record, wrapper=lambda call: "wrapped"))
    assert only(registry).state is PatchState.PENDING
    setattr(lib, absent, entire)
    lib.__spec__._initializing = False
    registry.complete()
    assert only(registry).state is PatchState.APPLIED


def test_a_hook_records_an_unforeseen_error_and_does_not_raise(lib: Any) -> None:
    """wrapt drops a hook that raised, and the next import goes through unpatched."""

    def explode() -> tuple[str, ...]:
        raise ZeroDivisionError("in prepare")

    registry = registered(patch(prepare=explode, wrapper=lambda call: None))
    assert only(registry).state is PatchState.REFUSED
    assert "ZeroDivisionError: in prepare" in only(registry).reason


def test_notes_of_a_wrapper_are_kept_once_each(lib: Any) -> None:
    """A wrapper that runs every step must not grow the report."""

    def around(call: Call) -> None:
        call.note("seen")

    registry = registered(patch(wrapper=around))
    lib.Base().load("r")
    lib.Base().load("r")
    assert only(registry).notes == ("seen",)


def test_what_somebody_else_wrapped_later_is_left_there_with_ours_disabled(lib: Any) -> None:
    """A blind restore would remove the later wrapper."""
    registry = registered(patch(wrapper=lambda call: ["ours"]))
    theirs = wrapt.FunctionWrapper(vars(lib.Base)["load"], lambda w, i, a, k: ["theirs", *w(*a, **k)])
    lib.Base.load = theirs
    assert registry.uninstall() == ("Base.load",)
    assert vars(lib.Base)["load"] is theirs
    assert lib.Base().load("r") == ["theirs", "base", "r", 1, {}]


def test_a_wrapper_that_was_replaced_is_refused_at_completion(lib: Any) -> None:
    """Another patch that dropped ours would leave a half-patched connector."""
    registry = registered(patch(wrapper=lambda call: None))
    lib.Base.load = lambda self, *args, **kwargs: None
    registry.complete()
    assert only(registry).state is PatchState.REFUSED
    assert "Base.load was replaced" in only(registry).reason


def test_a_wrapper_around_ours_that_says_so_is_accepted_at_completion(lib: Any) -> None:
    """Tracers wrap with wrapt or functools.wraps; both lead to our wrapper."""
    registry = registered(patch(wrapper=lambda call: ["ours"]), patch(**LAYOUT, wrapper=lambda call: "ours"))
    lib.Base.layout = wrapt.FunctionWrapper(vars(lib.Base)["layout"], lambda w, i, a, k: w(*a, **k))
    ours = lib.Base.load

    @functools.wraps(ours)
    def traced(*args: Any, **kwargs: Any) -> Any:
        return ours(*args, **kwargs)

    lib.Base.load = traced
    registry.complete()
    assert [outcome.state for outcome in registry.outcomes()] == [PatchState.APPLIED, PatchState.APPLIED]


def test_refusals_of_the_environment_and_of_patches_are_listed_together(lib: Any) -> None:
    """The gate raises them as one."""
    registry = registered(patch(kind="classmethod", wrapper=lambda call: None))
    cause = Refused(found="f", expected="e", consequence="c", remedy="r")
    registry.refuse("version", cause)
    registry.refuse("version", cause)
    assert [name for name, _ in registry.refusals()] == ["version", "worker.load"]


SUBCLASSES = """
import functools
from lib.worker import Base, Sub

def traced(function):
    @functools.wraps(function)
    def around(*args, **kwargs):
        return function(*args, **kwargs)
    return around

class Plain(Base):
    def other(self): ...
class Calls(Base):
    def load(self, request, **more):
        if request is None:
            return []
        return super().load(request, **more)
class Names(Sub):
    def load(self, request, **more):
        return Base.load(self, request, **more)
class Traced(Base):
    @traced
    def load(self, request, **more):
        return super().load(request, **more)
class Replaces(Base):
    def load(self, request, **more):
        return []
class Below(Calls, Replaces):
    pass
class Bound(Base):
    load = functools.partialmethod(Base.load, count=2)
class Deep(Base):
    @property
    def depth(self):
        return 4
class Deeper(Base):
    @property
    def depth(self):
        return super().depth + 1
class Other:
    def load(self, request, **more):
        return []
"""


@pytest.mark.parametrize(
    ("name", "found"),
    [
        ("Plain", ""),
        ("Sub", ""),
        ("Calls", ""),
        ("Names", ""),
        ("Traced", ""),
        ("Replaces", "theirs.Replaces.load does not call super().load"),
        ("Below", "theirs.Replaces.load does not call super().load"),
        ("Bound", "theirs.Bound.load does not call super().load"),
        ("Deep", "theirs.Deep.depth does not call super().depth"),
        ("Deeper", ""),
        ("Other", "theirs.Other does not extend lib.worker.Base"),
    ],
)
def test_a_class_in_the_place_of_the_target_has_to_reach_its_patches(
    lib: Any, make_module: Callable[..., Any], name: str, found: str
) -> None:
    """``vllm serve --scheduler-cls``: the target is patched, but something else runs."""
    theirs = make_module("theirs", SUBCLASSES)
    registry, other = Registry(), Target("another", "lib.worker", "Sub")
    one, two = patch(), patch("depth", kind="property", parameters="self")
    registry.add([replace(each, wrapper=lambda call: call.proceed()) for each in (one, two, patch("gone"))])
    registry.complete()
    causes = [cause.found for _, cause in registry.bypassed(getattr(theirs, name), one.target)]
    assert set(causes) == ({found} if found else set())
    assert not registry.bypassed(theirs.Replaces, other)
