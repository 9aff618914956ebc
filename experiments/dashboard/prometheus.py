# SPDX-License-Identifier: Apache-2.0
"""Runs Prometheus on loopback, adds servers to what it scrapes, and asks its HTTP API."""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import yaml

from experiments.common.router import running_router
from experiments.common.servers import HOST, ServerError, free_ports
from experiments.dashboard.queries import FOLDER

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
        self.began_at = time.time()
        self.names: dict[str, str] = {}

    def scrape(self, names: dict[str, str]) -> None:
        """Scrape these servers, URL -> name, and no other ones; the name is the label ``instance`` of their series."""
        places = {url.removeprefix("http://"): name for url, name in names.items()}
        self.names |= places
        scraped = [{"targets": [place], "labels": {"instance": name, "job": "vllm"}} for place, name in places.items()]
        partial = self._targets.with_suffix(".partial")
        partial.write_text(json.dumps(scraped))
        partial.replace(self._targets)

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

    def version(self) -> str:
        return str(self._http.get("/api/v1/status/buildinfo").json()["data"]["version"])

    def is_ready(self) -> bool:
        with contextlib.suppress(httpx.TransportError):
            return self._http.get("/-/ready").status_code == httpx.codes.OK
        return False

    def _ask(self, what: str, **params: Any) -> Any:
        content = self._http.post(f"/api/v1/{what}", data=params).json()
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
    """Start Prometheus with the alert rules; it scrapes nothing yet. Raises ServerError if it does not start."""
    (port,) = free_ports(1)
    folder = (logs / "prometheus").resolve()
    folder.mkdir(parents=True)
    targets = folder / "targets.json"
    targets.write_text("[]")
    (folder / "prometheus.yaml").write_text(yaml.safe_dump(config_of(targets)))
    command = [program, f"--config.file={folder / 'prometheus.yaml'}", f"--storage.tsdb.path={folder / 'data'}"]
    command += [f"--web.listen-address={HOST}:{port}", "--log.level=warn"]
    made = Prometheus(f"http://{HOST}:{port}", targets)
    with running_router(command, logs / "prometheus.log", made.is_ready, "/-/ready to answer"):
        yield made
