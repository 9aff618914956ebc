# SPDX-License-Identifier: Apache-2.0
"""With the gate closed nothing changes and nothing costs time; with the gate open a start is complete or refused."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from support.environments import SITECUSTOMIZE, Environment, make_environment

from kvcached_nixl.vllm.adapter.versions import SUPPORTED

ON = {"ENABLE_KVCACHED": "1"}
OFF = [{}, {"ENABLE_KVCACHED": "0"}, {"ENABLE_KVCACHED": "1", "KVCACHED_NIXL": "0"}]
KV = "vllm.distributed.kv_transfer.kv_connector"
Tree = Callable[..., Path]


@pytest.mark.parametrize("environ", OFF, ids=str)
@pytest.mark.parametrize("version", ["0.26.0", "0.28.0", "0.33.0"])
def test_when_off_nothing_is_wrapped_and_connectors_are_stock(
    installed: Environment, tree: Tree, environ: dict[str, str], version: str
) -> None:
    """Every door is tried; vLLM is untouched all the same."""
    path = (SITECUSTOMIZE, tree(version))
    state = installed.probe("vllm", "plugins", "install", "create=NixlConnector", path=path, **environ)
    assert state["wrapped"] == {} and state["traces"] == []
    assert state["created"][0].startswith("Nixl")
    assert "torch" not in state["imported"]


@pytest.mark.parametrize("environ", OFF[:2], ids=str)
def test_when_off_an_import_of_vllm_loads_nothing_more_of_ours(
    with_wheel: Environment, tree: Tree, environ: dict[str, str]
) -> None:
    code = "import sys; old = {*sys.modules}; import vllm; print(sorted({*sys.modules} - old))"
    assert with_wheel.run("-c", code, path=(tree("0.28.0"),), **environ).stdout.strip() == "['vllm']"


@pytest.mark.parametrize(
    ("version", "options", "words"),
    [
        ("0.25.1", (), ["vLLM 0.25.1", SUPPORTED, "Install a supported vLLM"]),
        ("0.26.0", ("--kvcached", "0.1.7"), ["kvcached 0.1.7", "==0.1.6"]),
        ("0.28.0", ("--no-nixl",), ["no NIXL", "pip install nixl"]),
        (
            "0.28.0",
            ("--change", "NixlBaseConnector.register_kv_caches=self, pools"),
            ["NixlBaseConnector.register_kv_caches", "(self, pools)", "(self, kv_caches)"],
        ),
        (
            "0.28.0",
            ("--change", "Scheduler._preempt_request=self, request"),
            ["Scheduler._preempt_request", "(self, request)", "(self, request, timestamp, drop_stale_output)"],
        ),
    ],
    ids=["vllm", "kvcached", "nixl", "signature", "two-signatures"],
)
def test_a_refusal_stops_nixl_connectors_in_words_and_no_others(
    with_wheel: Environment, tree: Tree, version: str, options: tuple[str, ...], words: list[str]
) -> None:
    """Directly, inside a MultiConnector, and a second time: never constructed. Other connectors are not disturbed."""
    nixl = ["create=NixlConnector", "create=MultiConnector:NixlConnector", "create=NixlConnector"]
    state = with_wheel.probe("vllm", *nixl, "create=OtherConnector", path=(tree(version, *options),), **ON)
    for error in state["created"][:3]:
        assert error.startswith("StartRefused")
        assert all(word in error for word in [*words, "found", "expected", "consequence", "remedy"])
    assert state["created"][3] == "OtherConnector"


@pytest.mark.parametrize("change", ["create_connector(cls, config, role", "create_connector(cls, request"])
@pytest.mark.parametrize("connector", ["NixlConnector", "MultiConnector:NixlConnector"])
def test_a_changed_factory_does_not_open_the_gate(
    with_wheel: Environment, tree: Tree, tmp_path: Path, change: str, connector: str
) -> None:
    """The constructor of the connector raises what the factory cannot."""
    source = tree("0.28.0")
    target = tmp_path / "tree"
    shutil.copytree(source, target)
    factory = target.joinpath(*f"{KV}.factory".split(".")).with_suffix(".py")
    text = factory.read_text()
    changed = text.replace("create_connector(cls, config, role", change + ", extra=None" * (change[-4:] == "role"))
    if change.endswith("request"):
        changed = text.replace(
            "create_connector(cls, config, role, kv_cache_config=None)", "create_connector(cls, config, *rest)"
        )
        changed = changed.replace("(config, role, kv_cache_config)", "(config, *rest)")
    assert changed != text
    factory.write_text(changed)
    state = with_wheel.probe("vllm", f"create={connector}", path=(target,), **ON)
    assert state["created"][0].startswith("StartRefused")
    assert "create_connector" in state["created"][0]


def test_a_constructor_that_cannot_be_wrapped_does_not_open_the_gate(
    with_wheel: Environment, tree: Tree, tmp_path: Path
) -> None:
    """The factory raises what the constructor of the connector cannot."""
    target = tmp_path / "tree"
    shutil.copytree(tree("0.28.0"), target)
    connector = target.joinpath(*f"{KV}.v1.nixl.connector".split(".")).with_suffix(".py")
    changed = "\nimport functools\nNixlBaseConnector.__init__ = functools.partialmethod(NixlBaseConnector.__init__)\n"
    connector.write_text(connector.read_text() + changed)
    actions = ("create=NixlConnector", "create=MultiConnector:NixlConnector", "create=OtherConnector")
    first, second, other = with_wheel.probe("vllm", *actions, path=(target,), **ON)["created"]
    assert all(error.startswith("StartRefused") and "[connector.__init__]" in error for error in (first, second))
    assert other == "OtherConnector"


def test_a_vllm_that_kvcached_has_not_patched_is_refused(with_wheel: Environment, tree: Tree, tmp_path: Path) -> None:
    """As with KVCACHED_AUTOPATCH=0, or where kvcached's start file is not executed. Its memory would not be elastic."""
    target = shutil.copytree(tree("0.28.0"), tmp_path / "tree")
    (target / "vllm/v1/core/block_pool.py").write_text("")
    created, other = with_wheel.probe("vllm", "create=NixlConnector", "create=OtherConnector", path=(target,), **ON)[
        "created"
    ]
    assert created.startswith("StartRefused") and "[kvcached's patches]" in created and "KVCACHED_AUTOPATCH" in created
    assert other == "OtherConnector"


PUSH = '{"transfer_mode": "push"}'
INSTEAD = ['"kv_connector": "NixlConnector"', '"transfer_mode": "push"']
RANDOM_IDS, RUST = "VLLM_DISABLE_REQUEST_ID_RANDOMIZATION", "VLLM_USE_RUST_FRONTEND"


@pytest.mark.parametrize(
    ("connector", "variables", "words", "remedy"),
    [
        # An operator who asks for something else must not get pull.
        ('NixlConnector{"transfer_mode": "both"}', {}, ["transfer_mode='both'"], []),
        # vLLM's own leaves requests waiting for ever when prefill fails.
        ("NixlPushConnector", {}, ["NixlPushConnector"], INSTEAD),
        (f"NixlPushConnector{PUSH}", {}, ["NixlPushConnector"], INSTEAD),
        # What decode asks prefill's memory about a request would be answered of its successor.
        ("NixlConnector", {RANDOM_IDS: "1"}, [RANDOM_IDS], ["Unset"]),
        (f"NixlConnector{PUSH}", {RANDOM_IDS: "1"}, [RANDOM_IDS], ["Unset"]),
        # Nothing of this package runs in it: `/inference/v1/generate` says 200 of a hand-over that has failed.
        ("NixlConnector", {RUST: "1"}, [f"{RUST}=1", "200"], []),
    ],
)
def test_what_cannot_be_served_is_refused(
    with_wheel: Environment, tree: Tree, connector: str, variables: dict[str, str], words: list[str], remedy: list[str]
) -> None:
    """In words. Other connectors are not disturbed."""
    actions = (f"create={connector}", "create=OtherConnector")
    created, other = with_wheel.probe("vllm", *actions, path=(tree("0.28.0"),), **ON, **variables)["created"]
    assert created.startswith("SettingsError") and all(one in created for one in words)
    assert all(one in created.partition("remedy:")[2] for one in remedy)
    assert other == "OtherConnector"


def test_patches_that_cannot_be_loaded_are_refused(with_wheel: Environment, tree: Tree, tmp_path: Path) -> None:
    """Without patches there is no gate either; then the connector cannot be imported, and the error says why."""
    broken = tmp_path / "torch.py"
    broken.write_text("raise ImportError('this torch is broken')")
    actions = ("vllm", "create=NixlConnector", "create=OtherConnector")
    state = with_wheel.probe(*actions, path=(tmp_path, tree("0.28.0")), **ON)
    assert state["created"][0].startswith("ImportError") and state["created"][1] == "OtherConnector"
    assert all(word in state["created"][0] for word in ("this torch is broken", "found", "remedy"))
    assert list(state["refusals"]) == ["patches"]


@pytest.mark.parametrize("missing", ["wrapt", "packaging"])
def test_a_missing_dependency_of_ours_does_not_open_the_gate(tree: Tree, tmp_path: Path, missing: str) -> None:
    """Without wrapt not even the gate can be hooked; then the connector cannot be imported at all."""
    environment = make_environment(tmp_path / "env", without=missing)
    path = (SITECUSTOMIZE, tree("0.28.0"))
    actions = ("vllm", "create=NixlConnector", "create=MultiConnector:NixlConnector", "create=OtherConnector")
    state = environment.probe(*actions, path=path, **ON)
    first, second, other = state["created"]
    assert missing in first and missing in second
    assert not first.startswith("Nixl") and not second.startswith("Multi")
    assert other == "OtherConnector"


def test_a_connector_that_was_imported_before_a_failed_start_is_refused_as_well(tree: Tree, tmp_path: Path) -> None:
    """The gate is opened in a script, after the connector was used; wrapt is missing."""
    environment = make_environment(tmp_path / "env", without="wrapt")
    actions = ("vllm", "create=NixlConnector", "enable", "install", "create=NixlConnector")
    before, after = environment.probe(*actions, path=(SITECUSTOMIZE, tree("0.28.0")))["created"]
    assert before.startswith("Nixl")
    assert after.startswith("ImportError") and "wrapt" in after


def test_an_unclear_switch_is_refused(with_wheel: Environment, tree: Tree) -> None:
    """KVCACHED_NIXL=off is not a known value; either guess would be wrong for some users."""
    environ = {**ON, "KVCACHED_NIXL": "off"}
    (created,) = with_wheel.probe("vllm", "create=NixlConnector", path=(tree("0.28.0"),), **environ)["created"]
    assert created.startswith("StartRefused") and "KVCACHED_NIXL='off'" in created
