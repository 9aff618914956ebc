# SPDX-License-Identifier: Apache-2.0
"""Runs Prometheus on loopback, adds servers to what it scrapes, and asks its HTTP API."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import subprocess
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import httpx
import yaml

from experiments.common.servers import HOST, ServerError, free_ports
from experiments.dashboard.queries import FOLDER

READY_SECONDS = 30.0
STOP_SECONDS = 20.0
STEP_SECONDS = 2


class Prometheus:
    """A running Prometheus.

    Attributes:
        began_at: seconds since the epoch.
        names: HOST:PORT of a server -> its name.
    """

    def __init__(self, url: str, targets: Path) -> None:
        self._http = httpx.Client(base_url=url, trust_env=False, timeout=60.0)
        self._targets = targets
        self._scraped: list[dict[str, Any]] = []
        self.began_at = time.time()
        self.version = ""
        self.names: dict[str, str] = {}

    def scrape(self, name: str, url: str, job: str) -> None:
        """Scrape a server from now on; ``name`` is the label ``instance`` of its series."""
        self.names[url.removeprefix("http://")] = name
        self._scraped.append({"targets": [url.removeprefix("http://")], "labels": {"instance": name, "job": job}})
        partial = self._targets.with_suffix(".partial")
        partial.write_text(json.dumps(self._scraped))
        partial.replace(self._targets)

    def forget(self) -> None:
        """Scrape nothing any more."""
        self._scraped = []
        self._targets.write_text("[]")

    def over_time(self, expression: str) -> list[dict[str, Any]]:
        """Return the series of an expression from the start until now, each with ``metric`` and ``values``."""
        window = {"start": self.began_at, "end": time.time(), "step": STEP_SECONDS}
        found: list[dict[str, Any]] = self._ask("query_range", query=expression, **window)["result"]
        return found

    def now(self, expression: str) -> float | None:
        """Return the only value of an expression now; None if it has none."""
        found = self._ask("query", query=expression)["result"]
        return float(found[0]["value"][1]) if found else None

    def fired(self) -> list[str]:
        """Return the alerts that have fired."""
        return sorted({one["metric"]["alertname"] for one in self.over_time('ALERTS{alertstate="firing"}')})

    def is_ready(self) -> bool:
        with contextlib.suppress(httpx.TransportError):
            if self._http.get("/-/ready").status_code == httpx.codes.OK:
                self.version = self._ask("status/buildinfo")["version"]
                return True
        return False

    def _ask(self, what: str, **params: Any) -> Any:
        answer = self._http.post(f"/api/v1/{what}", data=params) if params else self._http.get(f"/api/v1/{what}")
        content = answer.json()
        if content["status"] != "success":
            raise ServerError(f"found that Prometheus refuses {params}: {content.get('error')}")
        return content["data"]


def config_of(targets: Path) -> dict[str, Any]:
    """Return the documented configuration, with ``targets``, scraped each second, in place of its static ones."""
    config: dict[str, Any] = yaml.safe_load((FOLDER / "prometheus.yaml").read_text())
    config["global"] = {"scrape_interval": "1s", "evaluation_interval": "1s"}
    config["rule_files"] = [str(FOLDER / one) for one in config["rule_files"]]
    first = config["scrape_configs"][0]
    del first["static_configs"]
    first["file_sd_configs"] = [{"files": [str(targets)], "refresh_interval": "1s"}]
    config["scrape_configs"] = [first]
    return config


@contextlib.contextmanager
def scraping(program: str, logs: Path) -> Iterator[Prometheus]:
    """Start Prometheus with the alert rules; it scrapes nothing yet.

    Raises:
        ServerError: it has ended, or is not ready in time.
    """
    (port,) = free_ports(1)
    folder = (logs / "prometheus").resolve()
    folder.mkdir(parents=True)
    targets = folder / "targets.json"
    targets.write_text("[]")
    (folder / "prometheus.yaml").write_text(yaml.safe_dump(config_of(targets)))
    command = [program, f"--config.file={folder / 'prometheus.yaml'}", f"--storage.tsdb.path={folder / 'data'}"]
    command += [f"--web.listen-address={HOST}:{port}", "--log.level=warn"]
    log = logs / "prometheus.log"
    with log.open("w") as out:
        process = subprocess.Popen(command, stdout=out, stderr=subprocess.STDOUT, start_new_session=True)
    try:
        made = Prometheus(f"http://{HOST}:{port}", targets)
        deadline = time.monotonic() + READY_SECONDS
        while not made.is_ready():
            if process.poll() is not None or time.monotonic() > deadline:
                said = log.read_text(errors="replace")[-2000:]
                raise ServerError(f"found Prometheus ended ({process.poll()}) or not ready; its log ends with:\n{said}")
            time.sleep(0.1)
        yield made
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGTERM)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(STOP_SECONDS)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def labels_of(metric: Mapping[str, str], legend: str) -> str:
    """Return a series' name in Grafana's format: a label that it does not have is left empty."""
    return re.sub(r"\{\{(\w+)\}\}", lambda one: metric.get(one[1], ""), legend)
