# SPDX-License-Identifier: Apache-2.0
"""The process that runs Ray Serve LLM: ``python ray_app.py CONFIG``, until SIGTERM or until its parent ends.

CONFIG is a JSON file: ``port``, ``metrics_port``, ``status``, and the arguments of ``build_pd_openai_app`` as ``app``.
Whenever their number changes, it adds a line to the file ``status``: how many replicas of each deployment run.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
from pathlib import Path

import ray
from ray import serve
from ray.serve.llm import build_pd_openai_app

LOOKED_SECONDS = 0.2
HOST = "127.0.0.1"


def main(config: dict[str, object], ends: threading.Event) -> None:
    # Actors are placed by what they ask for, not by what they use.
    ray.init(
        "local",
        num_cpus=32,
        include_dashboard=False,
        object_store_memory=200_000_000,
        _metrics_export_port=config["metrics_port"],
        # Its default is 10 s: counters would be read too early.
        _system_config={"metrics_report_interval_ms": 500},
        _node_ip_address=HOST,
    )
    serve.start(http_options={"host": HOST, "port": config["port"]}, proxy_location="HeadOnly")
    serve.run(build_pd_openai_app(config["app"]), blocking=False)
    before, parent = None, os.getppid()
    with Path(str(config["status"])).open("a") as status:
        while os.getppid() == parent and not ends.wait(LOOKED_SECONDS):
            (application,) = serve.status().applications.values()
            found = {name: one.replica_states.get("RUNNING", 0) for name, one in application.deployments.items()}
            if found != before:
                before = found
                status.write(json.dumps(found) + "\n")
                status.flush()
    serve.shutdown()
    ray.shutdown()


if __name__ == "__main__":
    ended = threading.Event()
    signal.signal(signal.SIGTERM, lambda *_: ended.set())
    main(json.loads(Path(sys.argv[1]).read_text()), ended)
