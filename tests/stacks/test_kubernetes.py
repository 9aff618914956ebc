# SPDX-License-Identifier: Apache-2.0
"""docs/deploy/kubernetes: a schema validator accepts the manifests, and the servers that they start serve.

Every command line is a manifest's. Only what a cluster provides is replaced: the model, addresses, ports, folders and
keys; and the settings of a CPU are added. What a Service does is in test_balancers.py.
"""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import httpx
import pytest
from support.kubernetes import ADDRESS, FOLDER, KEY, PORT, ROLES, Container, Workload, read, workloads
from support.waiting import until

from experiments.common import device
from experiments.common.counted import COUNT_SECONDS, HAND_OVERS, count
from experiments.common.model import ModelShape, make_model
from experiments.common.servers import HOST, Running, Server, ServerSpec
from experiments.stacks.routers import environment

FILES = sorted(FOLDER.glob("*.yaml"))
RELEASES = ("1.25", "1.29", "1.33", "1.37")
"""Of Kubernetes: the first and the last that the validator has schemas of, and two between them."""
FAILURES = "kvcached_nixl:handover_failures_total"
DRAINS = re.compile(r"draining (\d+ )?in-flight requests|Shutting down: \d+ requests", re.IGNORECASE)
OF_THE_CLUSTER = ("HOME", ADDRESS, PORT, KEY)
SECRET = {"prefill": "of-prefill", "decode": "of-clients"}


# -------------------------------------------------------------------------------------------------------------- schemas


@pytest.fixture(scope="session")
def validate() -> Callable[[Path, str], str]:
    """(file, release of Kubernetes) -> what kubernetes-validate has to say against it."""
    program = environment("kubernetes", print) / "kubernetes-validate"

    def run(path: Path, release: str) -> str:
        command = [str(program), "--strict", "--quiet", "--kubernetes-version", release, str(path)]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        assert (done.returncode == 0) == (done.stdout + done.stderr == ""), done
        return done.stdout + done.stderr

    return run


@pytest.mark.parametrize("release", RELEASES)
@pytest.mark.parametrize("path", FILES, ids=lambda path: path.name)
def test_a_schema_validator_accepts_them(path: Path, release: str, validate: Callable[[Path, str], str]) -> None:
    assert validate(path, release) == ""


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("containerPort: 8000", 'containerPort: "8000"'),
        ("readinessProbe:", "readyProbe:"),
        ("maxUnavailable: 1}", "maxUnavailable: [1]}"),
        ("fieldPath: status.podIP", "path: status.podIP"),
    ],
)
def test_the_validator_sees_planted_faults(
    old: str, new: str, tmp_path: Path, validate: Callable[[Path, str], str]
) -> None:
    """A type, an unknown key, a key that is missing by then, a key deep below."""
    text = (FOLDER / "prefill.yaml").read_text()
    assert old in text
    (tmp_path / "planted.yaml").write_text(text.replace(old, new))
    assert "did not validate" in validate(tmp_path / "planted.yaml", RELEASES[-1])


# -------------------------------------------------------------------------------------------------------------- servers


@dataclass(frozen=True)
class ManifestSpec(ServerSpec):
    """A server as a manifest starts it. ``of_cluster``: what stands in its command line, and here something else."""

    container: Container | None = None
    of_cluster: Mapping[str, str] = field(default_factory=dict)

    def command(self, port: int, engine_id: str) -> list[str]:
        assert self.container is not None
        line = "\0".join(self.container.command)
        here = {"/models/model": str(self.model), "--port=8000": f"--port={port}", **self.of_cluster}
        for there, one in here.items():
            assert there in line
            line = line.replace(there, one)
        words = line.split("\0")
        assert words[0] == "vllm"
        of_cpu = ["--host", HOST, "--enforce-eager", "--dtype", self.dtype, "--max-model-len", "2048", "--seed", "0"]
        of_cpu += ["--distributed-executor-backend", self.executor, "--block-size", "32", *device.arguments(1)]
        return [str(self.executable), *words[1:], *of_cpu]


@pytest.fixture(scope="module")
def manifests() -> dict[str, Workload]:
    return workloads(read("prefill.yaml", "decode.yaml"))


def spec(name: str, one: Container, **of_cluster: str) -> ManifestSpec:
    of_manifest = {key: value for key, value in one.environ.items() if key not in OF_THE_CLUSTER}
    return ManifestSpec(
        name=name,
        model=make_model(ModelShape()),
        dtype="float32",
        environment={"KVCACHED_HOSTVMM_GIB": "2", **device.layout(), **of_manifest, KEY: SECRET[name]},
        container=one,
        of_cluster=of_cluster,
        forks=True,
    )


@pytest.fixture(scope="module")
def pair(manifests: dict[str, Workload], tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Server]]:
    """The name of prefill's Service is "localhost" here, so decode looks it up."""
    logs = tmp_path_factory.mktemp("kubernetes")
    key = logs / "prefill-api-key"
    key.write_text(f"{SECRET['prefill']}\n")
    with Running([spec("prefill", manifests["prefill"].serving)], logs) as prefills:
        url = prefills.servers[0].base_url.replace(HOST, "localhost")
        of_cluster = {"http://prefill:8000": url, "/keys/prefill-api-key": str(key)}
        with Running([spec("decode", manifests["decode"].serving, **of_cluster)], logs) as decodes:
            yield {"prefill": prefills.ready()[0], "decode": decodes.ready()[0]}


def is_ok(url: str) -> bool:
    with contextlib.suppress(httpx.TransportError):
        return httpx.get(url, trust_env=False, timeout=5.0).status_code == httpx.codes.OK
    return False


def asked_of(server: Server, prompt: list[int], key: str = "") -> tuple[int, str]:
    """(status, text) of an answer. ``key``: the right one without it."""
    asked = {"model": "model", "prompt": prompt, "max_tokens": 12, "temperature": 0, "ignore_eos": True}
    headers = {"Authorization": f"Bearer {key or server.spec.environment[KEY]}"}
    answer = httpx.post(
        f"{server.base_url}/v1/completions", json=asked, headers=headers, trust_env=False, timeout=120.0
    )
    return answer.status_code, answer.json()["choices"][0]["text"] if answer.status_code == httpx.codes.OK else ""


def prompts(seed: int) -> list[list[int]]:
    return [[3 + (7 * place + 31 * number + seed) % 500 for place in range(150)] for number in range(4)]


def test_decode_asks_prefill_by_its_name_with_its_key(pair: dict[str, Server]) -> None:
    """Prefill alone says what is right. A hand-over that failed would be recomputed, so the metrics decide."""
    prefill, decode = pair["prefill"], pair["decode"]
    found = [asked_of(decode, prompt) for prompt in prompts(1)]
    assert found == [asked_of(prefill, prompt) for prompt in prompts(1)]
    deadline = time.monotonic() + COUNT_SECONDS
    # Engines report what they have counted with their next step.
    while count([prefill, decode], HAND_OVERS) < len(found) and time.monotonic() < deadline:
        asked_of(prefill, [5] * 8)
        asked_of(decode, [5] * 8)
    assert (count([prefill, decode], HAND_OVERS), count([decode], FAILURES)) == (len(found), 0)
    assert asked_of(decode, [5] * 8, key=SECRET["prefill"])[0] == asked_of(prefill, [5] * 8, SECRET["decode"])[0] == 401


def test_every_probe_of_a_server_is_answered(pair: dict[str, Server], manifests: dict[str, Workload]) -> None:
    """Probes have no key."""
    for name, server in pair.items():
        for kind, probe in manifests[name].serving.probes.items():
            assert is_ok(f"{server.base_url}{probe['httpGet']['path']}"), (name, kind)


def test_ucx_listens_in_the_range_that_the_policy_opens(
    pair: dict[str, Server], manifests: dict[str, Workload]
) -> None:
    """It listens at every address of the host, loopback and others alike."""
    first, last = map(int, manifests["prefill"].serving.environ["UCX_TCP_PORT_RANGE"].split("-"))
    for server in pair.values():
        ports = listening(server.process.pid)
        assert {server.port, server.side_channel_port} <= ports
        assert [one for one in ports if first <= one <= last], f"{server.spec.name} listens at {sorted(ports)}"


def listening(group: int) -> set[int]:
    """TCP ports at which the processes of a session listen."""
    sockets = set()
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if os.getsid(int(folder.name)) == group:
                sockets |= {os.readlink(one) for one in (folder / "fd").iterdir()}
    found = set()
    for table in ("tcp", "tcp6"):
        for line in Path(f"/proc/net/{table}").read_text().splitlines()[1:]:
            cells = line.split()
            if cells[3] == "0A" and f"socket:[{cells[9]}]" in sockets:
                found.add(int(cells[1].rpartition(":")[2], 16))
    return found


def test_the_table_of_what_a_cluster_replaces_is_complete(manifests: dict[str, Workload]) -> None:
    """Whatever else the cluster fills in, the servers above would run without it."""
    for name in ROLES:
        filled_in = {key for key, value in manifests[name].serving.environ.items() if value == ""}
        assert filled_in == {ADDRESS, KEY} <= {*OF_THE_CLUSTER}


@contextlib.contextmanager
def draining(server: Server) -> Iterator[None]:
    """One signal to the first process, as the kubelet sends it, while a request runs."""
    asked = {"model": "model", "prompt": [5] * 20, "max_tokens": 1900, "ignore_eos": True, "stream": True}
    headers = {"Authorization": f"Bearer {server.spec.environment[KEY]}"}
    url = f"{server.base_url}/v1/completions"
    with httpx.stream("POST", url, json=asked, headers=headers, trust_env=False, timeout=120.0) as answer:
        events = answer.iter_lines()
        next(events)
        server.process.send_signal(signal.SIGTERM)
        until(lambda: DRAINS.search(server.log.read_text()), server.tail, COUNT_SECONDS)
        yield
        assert server.process.poll() is None, "it did not drain any more"
        assert [line for line in events if line][-1] == "data: [DONE]", "the request was not finished"


@pytest.mark.parametrize("name", ROLES)
def test_a_server_that_drains_ends_in_time_and_clients_get_right_answers(
    name: str, pair: dict[str, Server], manifests: dict[str, Workload]
) -> None:
    """The last test, since it ends the servers: first prefill, then the only decode, without a prefill."""
    server, decode = pair[name], pair["decode"]
    right = [asked_of(server, prompt) for prompt in prompts(2 + len(name))]
    others = [[3 + len(name), *prompt] for prompt in prompts(3)]
    with draining(server):
        assert [asked_of(decode, prompt) for prompt in prompts(2 + len(name))] == right
        assert [asked_of(decode, prompt)[0] for prompt in others] == [200] * len(others)
        assert not is_ok(f"{server.base_url}/health"), "nobody would notice"
    assert server.process.wait(manifests[name].pod["terminationGracePeriodSeconds"]) == 0, server.tail()
