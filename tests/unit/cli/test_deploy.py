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

from kvcached_nixl import side_channel_address
from kvcached_nixl.__main__ import main
from kvcached_nixl.cli.deploy import configuration, connectors, examine, network, process, stacks
from kvcached_nixl.cli.deploy.examine import CHECKS, Check, Examined, render, to_json
from kvcached_nixl.cli.deploy.serve_command import SHORT, ServeCommand, transfer_config
from kvcached_nixl.cli.deploy.situation import Host, Situation
from kvcached_nixl.cli.finding import Finding
from kvcached_nixl.cli.limits import FILES, LOCKED, MAPPINGS, SHARED, UNLIMITED, limits, shortfalls
from kvcached_nixl.errors import SettingsError

POD = "10.1.2.3"
LIMITS = {LOCKED: UNLIMITED, FILES: 65_536, MAPPINGS: 65_530, SHARED: 1 << 30}


NAMES = {
    "localhost": ["127.0.0.1"],
    "v6": ["fd00::1"],
    "two": [POD, "10.1.2.4"],
    "both": [POD, "127.0.0.1"],
    "prefill.example": ["203.0.113.7"],
}


@pytest.fixture(autouse=True)
def names_without_a_server(monkeypatch: pytest.MonkeyPatch) -> None:
    """Numbers are looked up as ever."""
    asked = side_channel_address.look_up

    def look_up(host: str) -> list[str]:
        if host not in NAMES and not host[0].isdigit() and ":" not in host:
            raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")
        return NAMES.get(host) or asked(host)

    for module in (side_channel_address, network):
        monkeypatch.setattr(module, "look_up", look_up)
        monkeypatch.setattr(module, "own_addresses", lambda: frozenset({POD, "127.0.0.1", "::1", "fd00::1"}))


@dataclasses.dataclass
class FakeHost(Host):
    own: tuple[str, ...] = (POD, "127.0.0.1", "::1", "fd00::1", "0.0.0.0", "::")
    outward: str = POD
    taken: tuple[int, ...] = ()
    taken_at: tuple[str, ...] = ()
    read_only: tuple[str, ...] = ()
    present: tuple[str, ...] = ()
    files: int = 65_535
    of_kernel: Mapping[str, int | str] = dataclasses.field(default_factory=lambda: LIMITS)

    def own_ip(self) -> str:
        return self.outward

    def why_not_bound(self, address: str, port: int) -> int | None:
        if address not in self.own:
            return errno.EADDRNOTAVAIL
        is_taken = port in self.taken and (not self.taken_at or address in self.taken_at)
        return errno.EADDRINUSE if is_taken else None

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


HOST, PORT = "VLLM_NIXL_SIDE_CHANNEL_HOST", "VLLM_NIXL_SIDE_CHANNEL_PORT"
ADVERTISE = "KVCACHED_NIXL_SIDE_CHANNEL_ADVERTISE"
IN_POD = {"KUBERNETES_SERVICE_HOST": "10.0.0.1"}
SHUTDOWN = ("--shutdown-timeout", "60")


def multi(*names: str | Mapping[str, Any], **extra: Any) -> dict[str, Any]:
    """NIXL with others beside it, of which "MultiConnector" has NIXL inside, too."""
    nixl = {"kv_connector": "NixlConnector"}
    inner = {"kv_connector": "MultiConnector", "kv_connector_extra_config": {"connectors": [nixl]}}
    beside = [{"kv_connector": one} if isinstance(one, str) else one for one in names]
    connectors = [nixl, *(inner if one == {"kv_connector": "MultiConnector"} else one for one in beside)]
    of_multi = {"connectors": connectors, "memory_path": "host", **extra}
    return {"kv_connector": "MultiConnector", "kv_connector_extra_config": of_multi}


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
        situation(transfer={"kv_connector": "NixlPullConnector"}),
        situation(transfer=multi("MultiConnector")),
        situation({HOST: "v6"}),
        situation({HOST: "0.0.0.0", f"{ADVERTISE}_HOST": "203.0.113.7"}),
        situation({HOST: "*", "VLLM_HOST_IP": "203.0.113.7"}, outward="0.0.0.0"),
        situation({HOST: ""}),
        situation({HOST: "two"}),
        situation(transfer=multi("Mine", trusted_connectors=["Mine"])),
        situation({HOST: "[fd00::1]", f"{ADVERTISE}_PORT": "15600", PORT: " 5600"}),
        situation({HOST: "0.0.0.0", f"{ADVERTISE}_HOST": POD, **IN_POD}),
        situation(command=("vllm", "serve", "MODEL", *SHUTDOWN, "--headless"), taken=(8000,)),
        situation(command=("vllm", "serve", "MODEL", *SHUTDOWN, "--uds=/run/vllm.sock"), taken=(8000,)),
        situation({"DYN_SYSTEM_PORT": "1"}, command=("python", "-m", "dynamo.vllm", *SHUTDOWN), taken=(8000,)),
        situation(command=(*COMMAND, "--host", "127.0.0.1"), taken=(8000,), taken_at=(POD, "0.0.0.0")),
        situation({PORT: "8000"}, command=(*COMMAND, "--host", "127.0.0.1")),
        situation(command=(*COMMAND, "-dp", "4", "--data-parallel-rank", "2"), taken=(5600, 5601, 5603)),
        situation(command=(*COMMAND, "-dp", "4", "-dpl", "0"), taken=(5600,)),
        situation(command=(*COMMAND, "--kv-offloading-size", "None")),
        situation({"VLLM_PORT": "1234", "RAY_ADDRESS": "auto", "RAY_JOB_ID": "01000000"}),
    ):
        assert [one for check in CHECKS if check is not VERSIONS for one in check(changed)] == []


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
    "a mistyped setting": (configuration.settings, {"extra": {"transfer_mod": "push"}}, "has 'transfer_mod'"),
    "a mistyped setting of a child": (
        configuration.settings,
        {"transfer": multi({"kv_connector": "NixlConnector", "kv_connector_extra_config": {"verify-fraction": 1}})},
        "has 'verify-fraction'",
    ),
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
    "ids": (
        configuration.settings,
        {"environ": {"VLLM_DISABLE_REQUEST_ID_RANDOMIZATION": "1"}},
        "VLLM_DISABLE_REQUEST_ID_RANDOMIZATION",
    ),
    "Rust": (configuration.settings, {"environ": {"VLLM_USE_RUST_FRONTEND": "1"}}, "VLLM_USE_RUST_FRONTEND=1"),
    "a setting of a child that is no object": (
        configuration.settings,
        {"transfer": multi({"kv_connector": "NixlConnector", "kv_connector_extra_config": [1]})},
        "kv_connector_extra_config [1]",
    ),
    "a setting of the pull connector": (
        configuration.settings,
        {"transfer": {"kv_connector": "NixlPullConnector"}, "extra": {"kv_lease_duration": "30"}},
        "kv_lease_duration='30'",
    ),
    "a neighbour": (
        connectors.neighbours,
        {"transfer": multi("OffloadingConnector")},
        "OffloadingConnector beside the NIXL connector",
    ),
    "a neighbour below": (
        connectors.neighbours,
        {"transfer": multi({**multi("LMCacheConnectorV1"), "kv_connector": "MultiConnector"})},
        "LMCacheConnectorV1 beside the NIXL connector",
    ),
    "offloading": (
        connectors.offloading,
        {"command": (*COMMAND, "--kv-offloading-size", "10")},
        "--kv-offloading-size 10",
    ),
    "no host": (network.side_channel, {"environ": {HOST: None}}, "localhost:5600"),
    "localhost in a pod": (
        network.side_channel,
        {"environ": {HOST: "127.0.0.1", **IN_POD}},
        "127.0.0.1:5600",
    ),
    "every address and none for peers, in a pod": (
        network.side_channel,
        {"environ": {HOST: "0.0.0.0", **IN_POD}, "outward": "0.0.0.0"},
        "vLLM finds no other address of this host",
    ),
    "a refused neighbour that is vouched for": (
        connectors.neighbours,
        {"transfer": multi("OffloadingConnector", trusted_connectors=["OffloadingConnector"])},
        "OffloadingConnector beside the NIXL connector",
    ),
    "peers told every address": (
        network.side_channel,
        {"environ": {f"{ADVERTISE}_HOST": "0.0.0.0"}},
        "stands for every address",
    ),
    "a URL for peers": (
        network.side_channel,
        {"environ": {f"{ADVERTISE}_HOST": "http://x:1"}},
        f"{ADVERTISE}_HOST='http://x:1'",
    ),
    "a port for peers": (network.side_channel, {"environ": {f"{ADVERTISE}_PORT": "abc"}}, f"{ADVERTISE}_PORT='abc'"),
    "a name without an address": (
        network.side_channel,
        {"environ": {HOST: "prefill"}},
        "for which there is no address",
    ),
    "another host's address": (
        network.side_channel,
        {"environ": {HOST: "10.1.2.4"}},
        "10.1.2.4 is no address of this host",
    ),
    "port of a side channel": (
        network.side_channel,
        {"environ": {PORT: "tcp://10.0.0.1:5600"}},
        "'tcp://10.0.0.1:5600'",
    ),
    "no port of a side channel": (network.side_channel, {"environ": {PORT: ""}}, f"{PORT}=''"),
    "ports of ranks": (
        network.side_channel,
        {"environ": {PORT: "65535"}, "command": (*COMMAND, "--data-parallel-size", "2")},
        "'65535' on data-parallel rank 1",
    ),
    "one port for both": (
        network.side_channel,
        {"command": ("vllm", "serve", "MODEL", "--port=5600")},
        "port 5600 for HTTP and for the side channel",
    ),
    "one port for both at one address": (
        network.side_channel,
        {"command": ("vllm", "serve", "MODEL", "--port=5600", "--host", POD)},
        "port 5600 for HTTP and for the side channel",
    ),
    "port of another server": (network.side_channel, {"taken": (5600,)}, "port 5600 of 10.1.2.3 is in use"),
    "port of another server at a name's second address": (
        network.side_channel,
        {"environ": {HOST: "both"}, "taken": (5600,), "taken_at": ("127.0.0.1",)},
        "port 5600 of 127.0.0.1 is in use",
    ),
    "port of another server at an address that nobody chose": (
        network.side_channel,
        {"environ": {HOST: None}, "taken": (5600,)},
        "port 5600 of 127.0.0.1 is in use",
    ),
    "port of a rank": (
        network.side_channel,
        {"taken": (5601,), "command": (*COMMAND, "-dpl=2")},
        "port 5601",
    ),
    "port of the only rank here": (
        network.side_channel,
        {"taken": (5602,), "command": (*COMMAND, "-dp", "4", "-dpn", "2")},
        "port 5602",
    ),
    "HTTP port of one address": (
        network.http_port,
        {"taken": (8000,), "taken_at": (POD,), "command": (*COMMAND, "--host", POD)},
        f"port 8000 of {POD}: Address already in use",
    ),
    "HTTP at another host's address": (
        network.http_port,
        {"command": (*COMMAND, "--host", "10.1.2.4")},
        "port 8000 of 10.1.2.4",
    ),
    "HTTP at no address": (network.http_port, {"command": (*COMMAND, "--host", "nobody")}, "--host nobody: no address"),
    "no HTTP port": (network.http_port, {"command": ("vllm", "serve", "MODEL", "--port", "70000")}, "port 70000"),
    "HTTP port": (network.http_port, {"taken": (8000,)}, "port 8000 of 0.0.0.0: Address already in use"),
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
    "loopback on purpose": (network.side_channel, {"environ": {HOST: "127.0.0.1"}}, "127.0.0.1:5600"),
    "a listener that peers do not reach": (
        network.side_channel,
        {"environ": {HOST: "127.0.0.1", f"{ADVERTISE}_HOST": POD}},
        f"is advertised as {POD}:5600",
    ),
    "a name for peers that is not known here": (
        network.side_channel,
        {"environ": {f"{ADVERTISE}_HOST": "prefill.cluster"}},
        "prefill.cluster:5600",
    ),
    "a neighbour that some vLLM serve": (
        connectors.neighbours,
        {"transfer": multi("ExampleConnector")},
        "ExampleConnector beside",
    ),
    "a neighbour of a plugin": (connectors.neighbours, {"transfer": multi("Mine")}, "Mine beside the NIXL connector"),
    "a neighbour's own class": (
        connectors.neighbours,
        {"transfer": multi({"kv_connector": "OffloadingConnector", "kv_connector_module_path": "mine"})},
        "OffloadingConnector beside the NIXL connector",
    ),
    "an own class": (
        configuration.transfer_config,
        {"transfer": {"kv_connector": "Mine", "kv_connector_module_path": "mine"}},
        "kv_connector Mine",
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
    at = situation({HOST: "prefill"}, taken=(5600,))
    assert "no address" in only(network.side_channel(at)).found
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


@pytest.mark.parametrize(
    ("words", "ranks"),
    [
        ("", [0]),
        ("-dp 2", [0, 1]),
        ("--data_parallel_size=2", [0, 1]),
        ("-dp=4 -dpl 2", [0, 1]),
        ("-dp 4 -dpl 2 -dpr 2", [2, 3]),
        ("-dp 4 --data-parallel-size-local 2 --data-parallel-start-rank=2 --headless", [2, 3]),
        ("-dp 4 -dpl 0", []),
        # Without the number of local ranks, vLLM starts all of them.
        ("-dp 4 -dpr 2", [0, 1, 2, 3]),
        ("-dp 4 -dpn 3", [3]),
        ("-dpn 3", [0]),
        ("-dp 4 --data-parallel-rank 3 -dpl 1", [3]),
        ("-dp 4 -tp 2 -n2 -r1", [2, 3]),
        ("-dp 2 -tp 2 --nnodes 2 --node-rank 1 -dpe -dpl 1", [1]),
        ("-dp 4 -tp 2 --nnodes 2 --node-rank 1 -dpe", [2]),
        ("-dp 2 -tp 4 -pp 2 -n 4 -r 2", [1]),
        ("-dp 2 -tp 4 -pp 2 -n 4 -r 3", []),
        ("-tp 8 -n 2", [0]),
        ("-tp 8 -n 2 -r 1", []),
    ],
)
def test_the_ranks_are_those_that_vllm_starts_here(words: str, ranks: list[int]) -> None:
    assert [*Situation({}, ServeCommand(("vllm", "serve", "MODEL", *words.split()))).ranks] == ranks


def test_short_names_are_read_as_the_long_ones() -> None:
    for short, long in SHORT.items():
        assert ServeCommand((short, "7")).value(long) == ServeCommand((f"{short}=7",)).value(long) == "7"
    assert ServeCommand(("-tpx", "7", "-x2", "-n")).value("--tensor-parallel-size") is None


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
    assert host.why_not_bound("fe80::1", 0) is not None
    # An address of the documentation's range, which no host has.
    assert host.why_not_bound("192.0.2.1", 0) == errno.EADDRNOTAVAIL


def test_a_host_without_ipv6_is_an_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> socket.socket:
        raise OSError(errno.EAFNOSUPPORT, "Address family not supported by protocol")

    monkeypatch.setattr(socket, "socket", refuse)
    assert Host().why_not_bound("::1", 0) == errno.EAFNOSUPPORT
    assert Host().own_ip() == "0.0.0.0"


def test_folders_are_asked_for(tmp_path: Path) -> None:
    """A folder that does not exist yet is created by a server, if its parent may be written."""
    host = Host()
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
