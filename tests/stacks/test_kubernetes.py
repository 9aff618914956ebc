# SPDX-License-Identifier: Apache-2.0
"""docs/deploy/kubernetes: a schema validator accepts the manifests, and the servers and routers that they start serve.

Every command line is a manifest's. Only what a cluster provides is replaced: the model, addresses, ports and folders;
and the settings of a CPU are added.
"""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import httpx
import pytest
from support.kubernetes import ADDRESS, FOLDER, PORT, ROLES, Container, Object, Workload, read, workloads

from experiments.common import device
from experiments.common.counted import COUNT_SECONDS, HAND_OVERS, count
from experiments.common.model import ModelShape, make_model
from experiments.common.router import running_router
from experiments.common.servers import ENVIRONMENT, HOST, Running, Server, ServerSpec, free_ports
from experiments.stacks.environments import environment

FILES = sorted(FOLDER.glob("*.yaml"))
VLLM_ROUTER, OWN_ROUTER = "router-vllm-router.yaml", "router-kvcached-nixl.yaml"
RELEASES = ("1.25", "1.29", "1.33", "1.37")
"""Of Kubernetes: the first and the last that the validator has schemas of, and two between them."""
FAILURES = "kvcached_nixl:handover_failures_total"
DRAINS = re.compile(r"draining (\d+ )?in-flight requests|Shutting down: \d+ requests", re.IGNORECASE)
OF_THE_CLUSTER = ("HOME", ADDRESS, PORT)


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
        ("serviceName: prefill", "servicename: prefill"),
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
    """A server as a manifest starts it."""

    container: Container | None = None

    def command(self, port: int, engine_id: str) -> list[str]:
        assert self.container is not None
        of_cluster = {"/models/model": str(self.model), "--port=8000": f"--port={port}"}
        words = [of_cluster.pop(word, word) for word in self.container.command]
        assert words[0] == "vllm" and not of_cluster
        of_cpu = ["--host", HOST, "--enforce-eager", "--dtype", self.dtype, "--max-model-len", "2048", "--seed", "0"]
        of_cpu += ["--distributed-executor-backend", self.executor, "--block-size", "32", *device.arguments(1)]
        return [str(self.executable), *words[1:], *of_cpu]


@pytest.fixture(scope="module")
def manifests() -> dict[str, Workload]:
    return workloads(read("prefill.yaml", "decode.yaml"))


def spec(name: str, one: Container) -> ManifestSpec:
    of_manifest = {key: value for key, value in one.environ.items() if key not in OF_THE_CLUSTER}
    return ManifestSpec(
        name=name,
        model=make_model(ModelShape()),
        dtype="float32",
        environment={"KVCACHED_HOSTVMM_GIB": "2", **device.layout(), **of_manifest},
        container=one,
        forks=True,
    )


@pytest.fixture(scope="module")
def pair(manifests: dict[str, Workload], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    specs = [spec(name, manifests[name].serving) for name in ROLES]
    with Running(specs, tmp_path_factory.mktemp("kubernetes")) as launched:
        launched.ready()
        yield launched


def routed_command(router: Container, pair: Running, port: int) -> list[str]:
    """The router's command line with the addresses of one server of each role instead of those of the pods."""
    words = [word for word in router.command if not word.startswith(("--prefill=", "--decode="))]
    urls = [f"--{name}={server.base_url}" for name, server in zip(ROLES, pair.servers, strict=True)]
    (metrics,) = free_ports(1)
    of_cluster = {"--port=8080": f"--port={port}", "--prometheus-port=29000": f"--prometheus-port={metrics}"}
    of_cluster |= {"--host=0.0.0.0": f"--host={HOST}", "--prometheus-host=0.0.0.0": f"--prometheus-host={HOST}"}
    return [of_cluster.get(word, word) for word in (*words, *urls)]


def launch_router(file: str, pair: Running, log: Path, port: int) -> contextlib.AbstractContextManager[object]:
    router = workloads(read(file))["router"]
    command = routed_command(router.serving, pair, port)
    programs = {"vllm-router": lambda: environment("vllm-router", print)}
    folder = programs.get(command[0], lambda: Path(ServerSpec("", Path()).executable).parent)()
    ready = router.serving.probes["readinessProbe"]["httpGet"]["path"]
    command = [str(folder / command[0]), *command[1:]]
    return running_router(command, log, lambda: is_ok(f"http://{HOST}:{port}{ready}"), f"{ready} to answer 200")


def is_ok(url: str) -> bool:
    with contextlib.suppress(httpx.TransportError):
        return httpx.get(url, trust_env=False, timeout=5.0).status_code == httpx.codes.OK
    return False


def complete(url: str, prompt: list[int]) -> str:
    asked = {"model": "model", "prompt": prompt, "max_tokens": 12, "temperature": 0, "ignore_eos": True}
    answer = httpx.post(f"{url}/v1/completions", json=asked, trust_env=False, timeout=120.0)
    answer.raise_for_status()
    return str(answer.json()["choices"][0]["text"])


@pytest.mark.parametrize("file", [VLLM_ROUTER, OWN_ROUTER])
def test_a_hand_over_behind_each_router(file: str, pair: Running, tmp_path: Path) -> None:
    """Prefill alone says what is right. A hand-over that failed would be recomputed, so the metrics decide."""
    (port,) = free_ports(1)
    prefill, url = pair.servers[0], f"http://{HOST}:{port}"
    before = count(pair.servers, HAND_OVERS)
    prompts = [[3 + (7 * place + 31 * number + len(file)) % 500 for place in range(150)] for number in range(4)]
    with launch_router(file, pair, tmp_path / "router.log", port):
        found = [complete(url, prompt) for prompt in prompts]
        for kind, probe in workloads(read(file))["router"].serving.probes.items():
            if "httpGet" in probe:
                assert is_ok(f"{url}{probe['httpGet']['path']}"), kind
    assert found == [complete(prefill.base_url, prompt) for prompt in prompts]
    deadline = time.monotonic() + COUNT_SECONDS
    # Engines report what they have counted with their next step.
    while count(pair.servers, HAND_OVERS) < before + len(prompts) and time.monotonic() < deadline:
        time.sleep(0.5)
        complete(prefill.base_url, [5] * 8)
    assert count(pair.servers, HAND_OVERS) == before + len(prompts)
    assert count(pair.servers, FAILURES) == 0


def test_every_probe_of_a_server_is_answered(pair: Running, manifests: dict[str, Workload]) -> None:
    for name, server in zip(ROLES, pair.servers, strict=True):
        for kind, probe in manifests[name].serving.probes.items():
            assert is_ok(f"{server.base_url}{probe['httpGet']['path']}"), (name, kind)


def test_ucx_listens_in_the_range_that_the_policy_opens(pair: Running, manifests: dict[str, Workload]) -> None:
    """It listens at every address of the host, loopback and others alike."""
    first, last = map(int, manifests["prefill"].serving.environ["UCX_TCP_PORT_RANGE"].split("-"))
    for server in pair.servers:
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


@pytest.mark.parametrize("name", ROLES)
def test_the_doctor_before_a_server_lets_it_start(name: str, manifests: dict[str, Workload]) -> None:
    """And with a fault of the manifest it does not. Its command line is the initContainer's."""
    (doctor,) = map(Container, manifests[name].pod["initContainers"])
    port, side_channel = free_ports(2)
    words = [f"--port={port}" if word == "--port=8000" else word for word in doctor.command[1:]]
    environ = {**os.environ, **ENVIRONMENT, **doctor.environ, "HOME": os.environ["HOME"], ADDRESS: HOST}
    environ |= {PORT: str(side_channel), **device.runner_environment({})}
    environ.pop("KUBERNETES_SERVICE_HOST", None)

    def run(**changed: str) -> subprocess.CompletedProcess[str]:
        command = [str(ServerSpec("", Path()).executable.parent / "python"), *words]
        return subprocess.run(command, env={**environ, **changed}, capture_output=True, text=True, check=False)

    done = run()
    assert done.returncode == 0 and f"  role           {ROLES[name]}\n" in done.stdout, done.stdout + done.stderr
    done = run(**{ADDRESS: "192.0.2.1"})  # of the documentation's range: no host has it
    assert done.returncode == 1 and "wrong: side channel" in done.stdout


def test_the_table_of_what_a_cluster_replaces_is_complete(manifests: dict[str, Workload]) -> None:
    """Whatever else the cluster fills in, the servers above would run without it."""
    objects: list[Object] = read("prefill.yaml", "decode.yaml")
    assert objects
    for name in ROLES:
        filled_in = {key for key, value in manifests[name].serving.environ.items() if value == ""}
        assert filled_in == {ADDRESS} <= {*OF_THE_CLUSTER}


@contextlib.contextmanager
def draining(server: Server) -> Iterator[None]:
    """One signal to the first process, as the kubelet sends it, while a request runs that no router knows of."""
    asked = {"model": "model", "prompt": [5] * 20, "max_tokens": 1900, "ignore_eos": True, "stream": True}
    with httpx.stream(
        "POST", f"{server.base_url}/v1/completions", json=asked, trust_env=False, timeout=120.0
    ) as answer:
        events = answer.iter_lines()
        next(events)
        server.process.send_signal(signal.SIGTERM)
        deadline = time.monotonic() + COUNT_SECONDS
        while not (drains := DRAINS.search(server.log.read_text())) and time.monotonic() < deadline:
            time.sleep(0.05)
        assert drains, server.tail()
        yield
        assert server.process.poll() is None, "it did not drain any more"
        assert [line for line in events if line][-1] == "data: [DONE]", "the request was not finished"


def asked_of(url: str, prompt: list[int]) -> tuple[int, str, str]:
    """(status, text, why it ended) of an answer."""
    asked = {"model": "model", "prompt": prompt, "max_tokens": 12, "temperature": 0, "ignore_eos": True}
    answer = httpx.post(f"{url}/v1/completions", json=asked, trust_env=False, timeout=120.0)
    if answer.status_code != httpx.codes.OK:
        return answer.status_code, "", ""
    (choice,) = answer.json()["choices"]
    return answer.status_code, choice["text"], choice["finish_reason"]


def test_a_server_that_drains_ends_in_time_and_what_clients_get_until_then(
    pair: Running, manifests: dict[str, Workload], tmp_path: Path
) -> None:
    """The last test, since it ends the servers: docs/deploy/kubernetes.md says what clients get."""
    prompts = [[3 + (11 * place + 37 * number) % 500 for place in range(120)] for number in range(2)]
    right = [(200, complete(pair.servers[0].base_url, prompt), "length") for prompt in prompts]
    for name, server in zip(ROLES, list(pair.servers), strict=True):
        with contextlib.ExitStack() as stack:
            urls = {}
            for file in (VLLM_ROUTER, OWN_ROUTER):
                (port,) = free_ports(1)
                stack.enter_context(launch_router(file, pair, tmp_path / name / f"{file}.log", port))
                urls[file] = f"http://{HOST}:{port}"
            with draining(server):
                found = {file: [asked_of(url, prompt) for prompt in prompts] for file, url in urls.items()}
                assert not is_ok(f"{server.base_url}/health"), "routers would not notice"
        assert server.process.wait(manifests[name].pod["terminationGracePeriodSeconds"]) == 0, server.tail()
        for file, answers in found.items():
            if "Shutting down: " in server.log.read_text():
                # It serves on for `drain_delay`.
                assert answers == right, (name, file)
            else:
                # Older vLLM: it listens no more. A request that was under way there fails.
                assert all(one in right or one[0] >= 500 for one in answers), (name, file, answers)
        if name == "prefill":
            pair.replace(0)
            pair.ready()
