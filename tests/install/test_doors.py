# SPDX-License-Identifier: Apache-2.0
"""Every way and order of activation ends in the same state, with each patch applied once."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from support.environments import SITECUSTOMIZE, Environment

VERSIONS = ("0.26.0", "0.30.0")
ORDERS = tuple(itertools.permutations(("vllm", "kvcached", "install", "plugins")))
CREATE = ("create=NixlConnector", "create=MultiConnector:NixlConnector", "create=OtherConnector")
ON = {"ENABLE_KVCACHED": "True"}
Tree = Callable[..., Path]
Reference = Callable[[str], dict[str, Any]]


def final(state: dict[str, Any]) -> dict[str, Any]:
    """What must be equal. Notes may differ: they tell the way."""
    return {key: state[key] for key in ("created", "outcomes", "refusals", "wrapped", "traces")}


@pytest.fixture(scope="session")
def reference(with_wheel: Environment, tree: Tree) -> Reference:
    """The state after the plain way in: the .pth, then vLLM. Checked by itself below."""
    made: dict[str, dict[str, Any]] = {}

    def get(version: str) -> dict[str, Any]:
        if version not in made:
            made[version] = final(with_wheel.probe("vllm", "kvcached", *CREATE, path=(tree(version),), **ON))
        return made[version]

    return get


@pytest.mark.parametrize("version", VERSIONS)
def test_the_plain_way_in_applies_every_patch_once(reference: Reference, version: str) -> None:
    """Nothing pending, nothing refused, no attribute wrapped twice, no trace of kvcached's own patch."""
    state = reference(version)
    assert {outcome for outcome, _ in state["outcomes"].values()} <= {"applied", "skipped"}
    assert set(state["wrapped"].values()) == {1}
    applied = [where for outcome, where in state["outcomes"].values() if outcome == "applied"]
    vllm = [where.rsplit(".", 2)[1:] for where in applied if where.startswith("vllm.")]
    assert sorted(".".join(name) for name in vllm) == list(state["wrapped"])
    assert "KVConnectorFactory.create_connector" in state["wrapped"]
    assert state["refusals"] == {} and state["traces"] == []
    assert state["created"][1:] == ["MultiConnector", "OtherConnector"]
    assert state["created"][0].startswith("Nixl")


@pytest.mark.parametrize("order", ORDERS, ids="-".join)
@pytest.mark.parametrize("version", VERSIONS)
def test_in_a_script_every_order_ends_in_the_same_state(
    bare: Environment, tree: Tree, unpacked: Path, reference: Reference, order: tuple[str, ...], version: str
) -> None:
    """ENABLE_KVCACHED set in the script, and no start file: kvcached's own patch may already be on vLLM, and comes
    off."""
    state = bare.probe("enable", *order, *CREATE, path=(unpacked, tree(version)))
    assert final(state) == reference(version)


@pytest.mark.parametrize("before", [(), ("kvcached",)], ids=["vllm", "kvcached"])
def test_a_script_may_set_the_variable_itself(
    installed: Environment, tree: Tree, reference: Reference, before: tuple[str, ...]
) -> None:
    """Before ``import vllm``, as kvcached's own start file reads it; ``VLLM_PLUGINS`` may name others only."""
    actions = ("enable", *before, "vllm", "kvcached", *CREATE)
    assert final(installed.probe(*actions, path=(tree("0.28.0"),))) == reference("0.28.0")
    path = (SITECUSTOMIZE, tree("0.28.0"))
    assert final(installed.probe("kvcached", *actions, path=path)) == reference("0.28.0")


@pytest.mark.parametrize("order", ORDERS, ids="-".join)
def test_at_interpreter_start_every_order_ends_in_the_same_state(
    with_wheel: Environment, tree: Tree, reference: Reference, order: tuple[str, ...]
) -> None:
    """The .pth came first; what follows adds nothing."""
    assert final(with_wheel.probe(*order, *CREATE, path=(tree("0.28.0"),), **ON)) == reference("0.28.0")


@pytest.mark.parametrize("order", list(itertools.permutations(("vllm", "kvcached", "install"))), ids="-".join)
def test_the_folder_on_pythonpath_ends_in_the_same_state_without_installing(
    bare: Environment, tree: Tree, reference: Reference, order: tuple[str, ...]
) -> None:
    """Nothing of the package is in the environment."""
    state = bare.probe(*order, *CREATE, path=(SITECUSTOMIZE, tree("0.28.0")), **ON)
    assert final(state) == reference("0.28.0")


def test_all_doors_at_once_end_in_the_same_state(installed: Environment, tree: Tree, reference: Reference) -> None:
    """Installed normally or editable, with the folder on PYTHONPATH and the plugin loader on top."""
    state = installed.probe("plugins", "install", "kvcached", *CREATE, path=(SITECUSTOMIZE, tree("0.28.0")), **ON)
    assert final(state) == reference("0.28.0")


@pytest.mark.parametrize("child", ["spawn", "fork"])
@pytest.mark.parametrize("before", [(), ("vllm",), ("plugins", "create=NixlConnector")], ids=["early", "vllm", "late"])
def test_children_end_in_the_same_state(
    installed: Environment, tree: Tree, reference: Reference, child: str, before: tuple[str, ...]
) -> None:
    """A spawned child installs again, a forked one inherits; both may import the rest in any order."""
    state = installed.probe("enable", *before, child, "kvcached", "plugins", *CREATE, path=(tree("0.28.0"),))
    assert final(state) == reference("0.28.0")


@pytest.mark.parametrize("version", VERSIONS)
def test_uninstalling_leaves_no_wrapper_and_a_later_installation_is_complete(
    with_wheel: Environment, tree: Tree, reference: Reference, version: str
) -> None:
    """Out and in again is the same as in; the rest of the first installation is inert."""
    path = (tree(version),)
    out = with_wheel.probe("vllm", "create=NixlConnector", "uninstall", path=path, **ON)
    assert out["wrapped"] == {} and out["traces"] == []
    again = with_wheel.probe("vllm", "create=NixlConnector", "uninstall", "install", *CREATE, path=path, **ON)
    assert final(again) == reference(version) | {"created": [again["created"][0], *reference(version)["created"]]}


def test_the_superseded_patch_is_reported_whichever_way_it_came(
    bare: Environment, with_wheel: Environment, tree: Tree, unpacked: Path
) -> None:
    """Loaded later it did nothing; applied before, it was taken off; the report says which."""
    later = with_wheel.probe("kvcached", "vllm", path=(tree("0.28.0"),), **ON)["notes"]["kvcached.patch_connector"]
    before = bare.probe("enable", "kvcached", "plugins", path=(unpacked, tree("0.28.0")))["notes"]
    assert any("superseded" in note for note in later)
    assert [note.split(":")[0] for note in before["kvcached.patch_connector"]] == [
        "NixlPullConnector.get_required_kvcache_layout"
    ]
