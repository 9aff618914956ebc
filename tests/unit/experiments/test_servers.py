# SPDX-License-Identifier: Apache-2.0
"""Servers start in a separate session, are waited for, and leave nothing behind; a stand-in plays vLLM."""

from __future__ import annotations

import json
import os
import socket
import stat
import sys
import textwrap
from pathlib import Path

import pytest

from experiments.common.servers import REPOSITORY, SERVER_SIDE, ServerSpec, running

STAND_IN = """\
#!{python}
import http.server, json, os, pathlib, subprocess, sys

class Health(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200 if self.path == "/health" else 404)
        self.end_headers()
    def log_message(self, *ignored):
        pass

port = int(sys.argv[sys.argv.index("--port") + 1])
# A child that ignores SIGTERM and holds a socket: what a stuck engine process looks like.
child = subprocess.Popen(
    [sys.executable, "-c", "import signal, socket, sys; signal.signal(signal.SIGTERM, signal.SIG_IGN);"
     "held = socket.socket(); held.bind(('127.0.0.1', 0)); held.listen(); print(held.getsockname()[1], flush=True);"
     "signal.pause()"],
    stdout=subprocess.PIPE, text=True)
held = int(child.stdout.readline())
wanted = ("KVCACHED_IPC_NAME", "ENABLE_KVCACHED", "VLLM_ANYTHING", "PYTHONPATH")
pathlib.Path("seen.json").write_text(json.dumps({{"environment": {{name: os.environ.get(name) for name in wanted}},
                                                 "session": os.getsid(0), "held": held}}))
http.server.HTTPServer(("127.0.0.1", port), Health).serve_forever()
"""


def stand_in(folder: Path, source: str) -> ServerSpec:
    """Return a spec that runs ``source`` instead of vLLM."""
    executable = folder / "vllm"
    executable.write_text(textwrap.dedent(source).format(python=sys.executable))
    executable.chmod(executable.stat().st_mode | stat.S_IXUSR)
    return ServerSpec(name="stand-in", model=folder, executable=executable)


def test_a_server_has_its_own_session_and_settings_and_its_children_end_with_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing of the caller's vLLM or kvcached settings reaches it; a child that ignores SIGTERM is killed."""
    monkeypatch.setenv("ENABLE_KVCACHED", "true")
    monkeypatch.setenv("VLLM_ANYTHING", "1")
    with running([stand_in(tmp_path, STAND_IN)], tmp_path) as (server,):
        seen = json.loads((tmp_path / "seen.json").read_text())
        assert seen["session"] == server.process.pid != os.getsid(0)
        assert seen["environment"]["KVCACHED_IPC_NAME"] == server.identity
        assert seen["environment"]["ENABLE_KVCACHED"] is None
        assert seen["environment"]["VLLM_ANYTHING"] is None
        assert seen["environment"]["PYTHONPATH"] == f"{SERVER_SIDE}{os.pathsep}{REPOSITORY}"
    assert server.process.returncode is not None
    with socket.socket() as probe, pytest.raises(ConnectionRefusedError):
        probe.connect(("127.0.0.1", seen["held"]))
