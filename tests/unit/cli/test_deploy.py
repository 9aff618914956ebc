# SPDX-License-Identifier: Apache-2.0
"""cli/deploy: every finding appears where it should, and none where a server is configured as documented."""

from __future__ import annotations

import dataclasses
import errno
import json
import os
import socket
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from kvcached_nixl.__main__ import main
from kvcached_nixl.cli.deploy import configuration, examine, network, process, stacks
from kvcached_nixl.cli.deploy.examine import CHECKS, Check, Examined, render, to_json
from kvcached_nixl.cli.deploy.serve_command import ServeCommand, transfer_config
from kvcached_nixl.cli.deploy.situation import Host, Situation
from kvcached_nixl.cli.finding import Finding
from kvcached_nixl.cli.limits import FILES, LOCKED, MAPPINGS, SHARED, UNLIMITED, limits, shortfalls
from kvcached_nixl.errors import SettingsError

POD = "10.1.2.3"
LIMITS = {LOCKED: UNLIMITED, FILES: 65_536, MAPPINGS: 65_530, SHARED: 1 << 30}


@dataclasses.dataclass
class FakeHost(Host):
    names: Mapping[str, tuple[str, ...]] = dataclasses.field(
        default_factory=lambda: {"localhost": ("127.0.0.1",), "0.0.0.0": ("0.0.0.0",), "v6": ("fd00::1",)}
    )
    own: tuple[str, ...] = (POD, "127.0.0.1", "fd00::1", "0.0.0.0")
    taken: tuple[int, ...] = ()
    read_only: tuple[str, ...] = ()
    present: tuple[str, ...] = ()
    files: int = 65_535
    of_kernel: Mapping[str, int | str] = dataclasses.field(default_factory=lambda: LIMITS)

    def addresses(self, name: str) -> tuple[str, ...]:
        if name in self.names:
            return self.names[name]
        if name[0].isdigit():
            return (name,)
        raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")

    def why_not_bound(self, address: str, port: int) -> int | None:
        if address not in self.own:
            return errno.EADDRNOTAVAIL
        return errno.EADDRINUSE if port in self.taken else None

    def why_not_written(self, folder: Path) -> str | None:
        return "Read-only file system" if str(folder) in self.read_only else None

    def limits(self) -> Mapping[str, int | str]:
        return self.of_kernel

    def most_open_files(self) -> int:
        return self.files

    def has(self, path: str) -> bool:
        return path in self.present


ENVIRON = {
    "ENABLE_KVCACHED": "true",
    "VLLM_NIXL_SIDE_CHANNEL_HOST": POD,
    "VLLM_NIXL_SIDE_CHANNEL_PORT": "5600",
    "HOME": "/home/vllm",
    "KVCACHED_IPC_NAME": "prefill",
}
TRANSFER: dict[str, Any] = {
    "kv_connector": "NixlConnector",
    "kv_role": "kv_producer",
    "kv_load_failure_policy": "fail",
    "kv_connector_extra_config": {"kv_lease_duration": 30, "memory_path": "host"},
}
COMMAND = ("vllm", "serve", "MODEL", "--port", "8000", "--shutdown-timeout", "60")


def situation(
    environ: Mapping[str, str | None] | None = None,
    transfer: Mapping[str, Any] | None = None,
    extra: Mapping[str, Any] | None = None,
    command: tuple[str, ...] | None = COMMAND,
    vllm: str = "0.28.0",
    **host: Any,
) -> Situation:
    """The documented configuration, with what a test changes; None removes a key."""
    of_environ = {key: value for key, value in {**ENVIRON, **(environ or {})}.items() if value is not None}
    config = {**TRANSFER, **(transfer or {})}
    if extra is not None:
        config["kv_connector_extra_config"] = extra
    config = {key: value for key, value in config.items() if value is not None}
    return Situation(of_environ, ServeCommand(command) if command else None, config, vllm, FakeHost(**host))


VERSIONS = configuration.versions
"""Looks at what is installed, which differs where the tests run; tests/install/test_command.py has it."""


def test_a_server_as_documented_has_no_finding() -> None:
    """Whatever its role; with or without a command line; in a pod."""
    for changed in (
        situation(),
        situation(transfer={"kv_role": "kv_consumer", "kv_load_failure_policy": "recompute"}),
        situation({"KUBERNETES_SERVICE_HOST": "10.0.0.1"}, present=("/dev/nvidiactl",)),
        situation(transfer={"kv_connector": "NixlPushConnector"}),
        situation(extra={"transfer_mode": "push", "memory_path": "auto"}),
        situation({"VLLM_NIXL_SIDE_CHANNEL_HOST": "v6"}),
        situation({"VLLM_PORT": "1234", "RAY_ADDRESS": "auto", "RAY_JOB_ID": "01000000"}),
    ):
        assert [one for check in CHECKS if check is not VERSIONS for one in check(changed)] == []


IN_POD = {"KUBERNETES_SERVICE_HOST": "10.0.0.1"}
GPU = {"present": ("/dev/nvidiactl",)}
WRONG: dict[str, tuple[Check, dict[str, Any], str]] = {
    "kvcached off": (configuration.gate, {"environ": {"ENABLE_KVCACHED": None}}, "ENABLE_KVCACHED is not set"),
    "kvcached mistyped": (configuration.gate, {"environ": {"ENABLE_KVCACHED": "yes"}}, "ENABLE_KVCACHED='yes'"),
    "package off": (configuration.gate, {"environ": {"KVCACHED_NIXL": "0"}}, "KVCACHED_NIXL=0 with kvcached on"),
    "package unclear": (configuration.gate, {"environ": {"KVCACHED_NIXL": "maybe"}}, "KVCACHED_NIXL='maybe'"),
    "no role": (configuration.role, {"transfer": {"kv_role": None}}, "no kv_role"),
    "another role": (configuration.role, {"transfer": {"kv_role": "prefill"}}, "kv_role 'prefill'"),
    "no connector": (configuration.transfer_config, {"transfer": {"kv_connector": None}}, "kv_connector missing"),
    "another connector": (
        configuration.transfer_config,
        {"transfer": {"kv_connector": "OffloadingConnector"}},
        "kv_connector OffloadingConnector",
    ),
    "a setting": (configuration.settings, {"extra": {"transfer_mode": "pul"}}, "transfer_mode='pul'"),
    "a setting of a child": (
        configuration.settings,
        {
            "transfer": {"kv_connector": "MultiConnector"},
            "extra": {
                "connectors": [
                    {"kv_connector": "NixlConnector", "kv_connector_extra_config": {"kv_lease_duration": "30"}}
                ]
            },
        },
        "kv_lease_duration='30'",
    ),
    "no object": (configuration.settings, {"extra": ["push"]}, "kv_connector_extra_config ['push']"),
    "two modes": (
        configuration.settings,
        {"transfer": {"kv_connector": "NixlPushConnector"}, "extra": {"transfer_mode": "pull"}},
        "NixlPushConnector with transfer_mode='pull'",
    ),
    "KV events": (
        configuration.settings,
        {"command": (*COMMAND, "--kv-events-config", '{"enable_kv_cache_events": true}'), "vllm": "0.19.1"},
        "--kv-events-config",
    ),
    "ids": (
        configuration.settings,
        {"environ": {"VLLM_DISABLE_REQUEST_ID_RANDOMIZATION": "1"}},
        "VLLM_DISABLE_REQUEST_ID_RANDOMIZATION",
    ),
    "no host": (
        network.side_channel_host,
        {"environ": {"VLLM_NIXL_SIDE_CHANNEL_HOST": None}},
        "is not set, so vLLM takes localhost",
    ),
    "localhost in a pod": (
        network.side_channel_host,
        {"environ": {"VLLM_NIXL_SIDE_CHANNEL_HOST": "127.0.0.1", **IN_POD}},
        "only this pod reaches",
    ),
    "every address": (
        network.side_channel_host,
        {"environ": {"VLLM_NIXL_SIDE_CHANNEL_HOST": "0.0.0.0"}},
        "the address of no host",
    ),
    "a name without an address": (
        network.side_channel_host,
        {"environ": {"VLLM_NIXL_SIDE_CHANNEL_HOST": "prefill"}},
        "which has no address",
    ),
    "another host's address": (
        network.side_channel_host,
        {"environ": {"VLLM_NIXL_SIDE_CHANNEL_HOST": "10.1.2.4"}},
        "10.1.2.4 is no address of this host",
    ),
    "port of a side channel": (
        network.side_channel_ports,
        {"environ": {"VLLM_NIXL_SIDE_CHANNEL_PORT": "tcp://10.0.0.1:5600"}},
        "'tcp://10.0.0.1:5600'",
    ),
    "ports of ranks": (
        network.side_channel_ports,
        {"environ": {"VLLM_NIXL_SIDE_CHANNEL_PORT": "65535"}, "command": (*COMMAND, "--data-parallel-size", "2")},
        "for 2 data-parallel ranks",
    ),
    "one port for both": (
        network.side_channel_ports,
        {"command": ("vllm", "serve", "MODEL", "--port=5600")},
        "port 5600 for HTTP and for the side channel",
    ),
    "port of another server": (network.side_channel_ports, {"taken": (5600,)}, "port 5600 of 10.1.2.3 is in use"),
    "port of a rank": (
        network.side_channel_ports,
        {"taken": (5601,), "command": (*COMMAND, "--data-parallel-size-local=2")},
        "port 5601",
    ),
    "HTTP port": (network.http_port, {"taken": (8000,)}, "port 8000: Address already in use"),
    "service links": (network.service_links, {"environ": {"VLLM_PORT": "tcp://10.0.0.9:8000"}}, "tcp://10.0.0.9:8000"),
    "/tmp": (process.sockets, {"read_only": ("/tmp",)}, "/tmp cannot be written"),
    "Dynamo's mode": (
        stacks.dynamo,
        {"environ": {"DYN_SYSTEM_PORT": "1"}, "command": ("dynamo.vllm", "--disaggregation-mode", "decode")},
        "--disaggregation-mode decode with kv_role kv_producer",
    ),
}
ADVICE: dict[str, tuple[Check, dict[str, Any], str]] = {
    "both roles": (configuration.role, {"transfer": {"kv_role": "kv_both"}}, "kv_role kv_both"),
    "policy": (configuration.load_failure_policy, {"transfer": {"kv_load_failure_policy": None}}, "no kv_load_failure"),
    "no shutdown timeout": (configuration.shutdown, {"command": ("vllm", "serve", "MODEL")}, "no --shutdown-timeout"),
    "short shutdown": (
        configuration.shutdown,
        {"command": ("vllm", "serve", "MODEL", "--shutdown-timeout", "10")},
        "--shutdown-timeout 10 and kv_lease_duration 30",
    ),
    "loopback on purpose": (
        network.side_channel_host,
        {"environ": {"VLLM_NIXL_SIDE_CHANNEL_HOST": "127.0.0.1"}},
        "only this machine reaches",
    ),
    "cache": (process.cache_folder, {"read_only": ("/home/vllm/.cache",)}, "/home/vllm/.cache cannot be written"),
    "XDG's": (
        process.cache_folder,
        {"environ": {"XDG_CACHE_HOME": "/c"}, "read_only": ("/c",)},
        "/c cannot be written",
    ),
    "shared memory": (process.limits, {"of_kernel": {**LIMITS, SHARED: 64 << 20}}, "64 MiB free in /dev/shm"),
    "mappings": (process.limits, {"of_kernel": {**LIMITS, MAPPINGS: 100}}, "vm.max_map_count=100"),
    "locked memory": (
        process.limits,
        {"of_kernel": {**LIMITS, LOCKED: 65_536}, "present": ("/sys/class/infiniband",)},
        "ulimit -l 65536",
    ),
    "open files": (process.open_files, {"files": 1024}, "ulimit -Hn 1024"),
    "one process": (
        process.multiprocessing,
        {"environ": {"VLLM_ENABLE_V1_MULTIPROCESSING": "0"}},
        "VLLM_ENABLE_V1_MULTIPROCESSING=0",
    ),
    "no copies of device memory": (
        process.transports,
        {"environ": {"UCX_TLS": "rc,tcp"}, "extra": {}, **GPU},
        "UCX_TLS=rc,tcp on a host with an NVIDIA GPU",
    ),
    "containers of one host": (
        process.transports,
        {"environ": IN_POD, "extra": {}, **GPU},
        "UCX_TLS is not set, in a container",
    ),
    "CUDA IPC of containers": (
        process.transports,
        {"environ": {"UCX_TLS": "tcp,cuda_ipc,cuda_copy"}, "extra": {}, "present": ("/.dockerenv", "/dev/nvidiactl")},
        "UCX_TLS=tcp,cuda_ipc,cuda_copy, in a container",
    ),
    "Ray": (stacks.ray, {"environ": {"RAY_ADDRESS": "auto"}}, "variables of Ray"),
    "Dynamo's port": (stacks.dynamo, {"command": ("python", "-m", "dynamo.vllm")}, "DYN_SYSTEM_PORT is not set"),
    "Dynamo's mode and both roles": (
        stacks.dynamo,
        {
            "environ": {"DYN_SYSTEM_PORT": "1"},
            "transfer": {"kv_role": "kv_both"},
            "command": ("dynamo.vllm", "--disaggregation-mode=prefill"),
        },
        "--disaggregation-mode prefill with kv_role kv_both",
    ),
}


def only(findings: Iterator[Finding]) -> Finding:
    (one,) = findings
    return one


@pytest.mark.parametrize("name", WRONG)
def test_what_is_wrong_is_found(name: str) -> None:
    check, changed, found = WRONG[name]
    one = only(check(situation(**changed)))
    assert found in one.found and one.is_wrong


@pytest.mark.parametrize("name", ADVICE)
def test_what_could_be_better_is_advice(name: str) -> None:
    check, changed, found = ADVICE[name]
    one = only(check(situation(**changed)))
    assert found in one.found and not one.is_wrong


def test_every_check_has_a_row() -> None:
    tried = {check for check, _, _ in (*WRONG.values(), *ADVICE.values())}
    assert {*CHECKS} - tried == {VERSIONS}


@pytest.mark.parametrize("name", [*WRONG, *ADVICE])
def test_every_finding_has_four_sentences(name: str) -> None:
    check, changed, _ = {**WRONG, **ADVICE}[name]
    one = only(check(situation(**changed)))
    assert all((one.name, one.found, one.expected, one.consequence, one.remedy))


def test_kvcached_s_name_is_shared_only_without_this_package() -> None:
    """With it, the variable is a prefix."""
    off = {"KVCACHED_NIXL": "0"}
    assert "each other's workers" in only(configuration.gate(situation(off))).consequence
    alone = only(configuration.gate(situation({**off, "KVCACHED_IPC_NAME": None})))
    assert "each other's workers" not in alone.consequence


def test_a_port_that_is_not_ours_is_not_asked_for() -> None:
    """No finding follows from another: an address that is wrong has no ports."""
    at = situation({"VLLM_NIXL_SIDE_CHANNEL_HOST": "prefill"}, taken=(5600,))
    assert [*network.side_channel_ports(at)] == []
    assert [*network.http_port(situation(command=None, taken=(8000,)))] == []


# ------------------------------------------------------------------------------------------------------ command line


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (("--kv-transfer-config", json.dumps(TRANSFER)), TRANSFER),
        ((f"--kv_transfer_config={json.dumps(TRANSFER)}",), TRANSFER),
        (("--kv-transfer-config", '{"kv_role": "kv_both"}', "--kv-transfer-config", json.dumps(TRANSFER)), TRANSFER),
        (
            ("--kv-transfer-config.kv_role", "kv_consumer", "--kv_transfer_config.kv_connector_extra_config.a_b=2"),
            {"kv_role": "kv_consumer", "kv_connector_extra_config": {"a_b": 2}},
        ),
        (("--enforce-eager",), None),
    ],
)
def test_the_configuration_is_read_as_vllm_reads_it(words: tuple[str, ...], expected: object) -> None:
    assert ServeCommand(("vllm", "serve", "MODEL", *words)).transfer == expected


@pytest.mark.parametrize("text", ["{'kv_role': 'kv_producer'}", "[]", "", '"kv_producer"'])
def test_what_is_no_object_is_refused(text: str) -> None:
    with pytest.raises(SettingsError, match="expected:    a JSON object"):
        transfer_config(text)


def test_flags_are_read_with_their_values() -> None:
    command = ServeCommand(("--port", "1", "--shutdown_timeout=2", "--port=3", "--enforce-eager"))
    assert (command.value("--port"), command.value("--shutdown-timeout")) == ("3", "2")
    assert (command.value("--enforce-eager"), command.value("--config")) == ("", None)
    at = Situation({}, command)
    assert (at.number("--port", 8000), at.number("--enforce-eager", 7), at.number("--tp", 9)) == (3, 7, 9)


# ------------------------------------------------------------------------------------------------------------ report


def examined(transfer: str | None = None, command: tuple[str, ...] = (), **host: Any) -> Examined:
    return examine.examine(ENVIRON, transfer, command, FakeHost(**host))


def names(found: Examined) -> list[str]:
    return [one.name for one in found.findings if one.name in ("connector", "role", "HTTP port")]


def test_the_configuration_comes_from_the_option_or_from_the_command_line() -> None:
    """Without either, the report says what was not examined."""
    command = (*COMMAND, "--kv-transfer-config", json.dumps(TRANSFER))
    assert names(examined(json.dumps(TRANSFER))) == names(examined(command=command)) == []
    (advice,) = [one for one in examined().findings if one.name == "connector"]
    assert not advice.is_wrong
    (wrong,) = [one for one in examined(command=COMMAND).findings if one.name == "connector"]
    assert wrong.is_wrong and "without --kv-transfer-config" in wrong.found
    (advice,) = [one for one in examined(command=(*COMMAND, "--config", "f.yaml")).findings if one.name == "connector"]
    assert not advice.is_wrong and "f.yaml" in advice.found


def test_a_configuration_that_cannot_be_read_is_one_finding() -> None:
    assert names(examined("{")) == ["connector"]
    assert names(examined(command=(*COMMAND, "--kv-transfer-config", "{"))) == ["connector"]


def test_the_report_has_all_findings_and_json_the_same() -> None:
    """What is wrong comes first. Colours only where they are asked for."""
    found = Examined({"role": "kv_producer"}, (Finding(*"abcde", is_wrong=False), Finding(*"vwxyz")))
    shown = render(found)
    assert shown.index("wrong: v") < shown.index("advice: a") and shown.endswith("\n1 wrong")
    assert "\x1b" not in shown and "\x1b[31mwrong: v" in render(found, colour=True)
    assert [one["name"] for one in to_json(found)["findings"]] == ["a", "v"]
    assert found.is_wrong and not Examined({}, found.findings[:1]).is_wrong
    assert "nothing" in render(Examined({}, ()))


# ------------------------------------------------------------------------------------------------------- this machine


def test_a_port_is_taken_while_something_listens_there() -> None:
    host = Host()
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        one.listen()
        port = one.getsockname()[1]
        assert host.why_not_bound("127.0.0.1", port) == errno.EADDRINUSE
    assert host.why_not_bound("127.0.0.1", port) is None
    # An address of the documentation's range, which no host has.
    assert host.why_not_bound("192.0.2.1", 0) == errno.EADDRNOTAVAIL


def test_folders_and_names_are_asked_for(tmp_path: Path) -> None:
    """A folder that does not exist yet is created by a server, if its parent may be written."""
    host = Host()
    assert host.addresses("127.0.0.1") == ("127.0.0.1",)
    with pytest.raises(OSError):
        host.addresses("no-such-host.invalid")
    assert host.why_not_written(tmp_path / "a" / "b") is None and [*tmp_path.iterdir()] == []
    assert host.why_not_written(Path("/proc/self")) is not None
    assert host.has("/proc") and not host.has("/nowhere") and host.most_open_files() != 0
    assert {*host.limits()} == {LOCKED, FILES, MAPPINGS, SHARED} == {*limits()}
    assert [*shortfalls({**LIMITS, SHARED: "not known: no such file"}, pins=True)] == []


def test_the_command_exits_with_what_it_found(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """1 if something is wrong; JSON has nothing beside it on standard output."""
    for name in ("ENABLE_KVCACHED", "VLLM_NIXL_SIDE_CHANNEL_HOST"):
        monkeypatch.delenv(name, raising=False)
    assert main(["doctor", "--deploy", "--json", "--", "vllm", "serve", "MODEL", "--port", "8000"]) == 1
    said = json.loads(capsys.readouterr().out)
    assert said["examined"]["command"] == "vllm serve MODEL --port 8000"
    assert {"gate", "side channel", "connector"} <= {one["name"] for one in said["findings"] if one["is_wrong"]}
    assert "ENABLE_KVCACHED" not in os.environ


@pytest.mark.parametrize(
    "arguments",
    [
        ("doctor", "--", "vllm"),
        ("doctor", "--kv-transfer-config", "{}"),
        ("doctor", "--deploy", "--peer", "127.0.0.1:5600"),
        ("--json", "--", "vllm"),
        ("doctor", "--deploy", "--unknown"),
    ],
)
def test_wrong_usage_exits_with_two(arguments: tuple[str, ...], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(arguments)
    assert ended.value.code == 2
    assert "error:" in capsys.readouterr().err
