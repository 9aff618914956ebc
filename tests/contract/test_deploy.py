# SPDX-License-Identifier: Apache-2.0
"""The command lines of docs/deploy/kubernetes are ones of this vLLM, and doctor --deploy reads them as vLLM does."""

from __future__ import annotations

import json
from typing import Any

import pytest

pytest.importorskip("vllm", reason="needs an environment: bash experiments/env.sh")
from support.kubernetes import ROLES, read, workloads
from vllm.entrypoints.cli import serve
from vllm.utils.argparse_utils import FlexibleArgumentParser
from vllm.utils.network_utils import get_ip

from kvcached_nixl.cli.deploy.serve_command import SHORT, ServeCommand
from kvcached_nixl.cli.deploy.situation import Host

GIVEN = {
    "kv_connector": "NixlConnector",
    "kv_role": "kv_consumer",
    "kv_load_failure_policy": "recompute",
    "kv_connector_extra_config": {"kv_lease_duration": 10, "transfer_mode": "push"},
}
WAYS: dict[str, tuple[str, ...]] = {
    "JSON": ("--kv-transfer-config", json.dumps(GIVEN)),
    "underscores": (f"--kv_transfer_config={json.dumps(GIVEN)}",),
    "the last one": ("--kv-transfer-config", '{"kv_role": "kv_both"}', "--kv-transfer-config", json.dumps(GIVEN)),
    "by key": (
        *("--kv-transfer-config.kv_connector", "NixlConnector", "--kv-transfer-config.kv_role=kv_consumer"),
        *("--kv_transfer_config.kv_load_failure_policy", "recompute"),
        "--kv-transfer-config.kv_connector_extra_config.kv_lease_duration=10",
        *("--kv-transfer-config.kv_connector_extra_config.transfer_mode", "push"),
    ),
    "by key after JSON": (
        *("--kv-transfer-config", '{"kv_connector": "NixlConnector"}', "--kv-transfer-config.kv_role", "kv_producer"),
    ),
}


@pytest.fixture(scope="module")
def parser() -> FlexibleArgumentParser:
    """That of the program ``vllm``."""
    program = FlexibleArgumentParser()
    commands = program.add_subparsers(required=True, dest="subparser")
    for one in serve.cmd_init():
        one.subparser_init(commands)
    return program


@pytest.mark.parametrize("name", ROLES)
def test_a_manifest_s_command_line_is_one_of_this_vllm(name: str, parser: FlexibleArgumentParser) -> None:
    """Each flag has the meaning that the manifest gives it."""
    words = workloads(read("prefill.yaml", "decode.yaml"))[name].serving.command
    assert words[0] == "vllm"
    found = parser.parse_args(list(words[1:]))
    assert found.subparser == "serve" and found.model_tag == "/models/model"
    assert (found.port, found.served_model_name) == (8000, ["model"])
    assert found.shutdown_timeout == {"prefill": 60, "decode": 300}[name]
    config = found.kv_transfer_config
    assert (config.kv_connector, config.kv_role, config.kv_load_failure_policy) == (
        "NixlConnector",
        ROLES[name],
        "recompute",
    )
    assert config.kv_connector_extra_config == {"kv_lease_duration": 30, "memory_path": "host"}


@pytest.mark.parametrize("way", WAYS)
def test_the_doctor_reads_what_vllm_reads(way: str, parser: FlexibleArgumentParser) -> None:
    words = ("vllm", "serve", "MODEL", *WAYS[way])
    try:
        found = parser.parse_args(list(words[1:])).kv_transfer_config
    except (SystemExit, ValueError):
        # "by key after JSON": a connector and its role are in two objects, of which vLLM takes the last.
        found = None
    read_here: dict[str, Any] = dict(ServeCommand(words).transfer or {})
    if way == "by key after JSON":
        assert read_here == {"kv_role": "kv_producer"} and (found is None or found.kv_connector is None)
        return
    assert found is not None
    assert {key: getattr(found, key) for key in read_here} == read_here == GIVEN


def test_short_names_are_those_of_this_vllm(parser: FlexibleArgumentParser) -> None:
    for short, long in SHORT.items():
        words = (short,) if long.endswith("-lb") else (short, "3")
        name = long[2:].replace("-", "_")
        assert vars(parser.parse_args(["serve", "MODEL", *words]))[name] in (True, 3), short
        if len(short) == 2:
            assert vars(parser.parse_args(["serve", "MODEL", f"{short}3"]))[name] == 3
    assert ServeCommand(("vllm", "serve", "MODEL", "-n3", "-r=3")).value("--nnodes") == "3"


def test_this_host_s_address_is_vllm_s(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("VLLM_HOST_IP", raising=False)
    assert Host().own_ip() == get_ip()
