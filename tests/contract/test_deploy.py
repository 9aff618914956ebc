# SPDX-License-Identifier: Apache-2.0
"""The command lines of docs/deploy/kubernetes are ones of this vLLM."""

from __future__ import annotations

import pytest

pytest.importorskip("vllm", reason="needs an environment: bash experiments/env.sh")
from support.kubernetes import ROLES, read, workloads
from vllm.entrypoints.cli import serve
from vllm.utils.argparse_utils import FlexibleArgumentParser


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
    assert {"kv_lease_duration": 30, "memory_path": "host"}.items() <= config.kv_connector_extra_config.items()
