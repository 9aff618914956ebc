# SPDX-License-Identifier: Apache-2.0
"""nginx in front of decode servers."""

from __future__ import annotations

import contextlib
import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path

from experiments.common.servers import HOST, Server, ServerError, free_ports
from experiments.stacks.routers import running

NGINX = """\
daemon off; worker_processes 1; pid {folder}/pid; error_log {folder}/error.log;
events {{ worker_connections 1024; }}
http {{
  access_log off; client_body_temp_path {folder}/body; proxy_temp_path {folder}/proxy;
  upstream decode {{ {servers} }}
  server {{
    listen {host}:{port};
    location / {{
      proxy_pass http://decode; proxy_http_version 1.1; proxy_set_header Connection close; proxy_buffering off;
      proxy_connect_timeout 2s; proxy_read_timeout 1h;
      proxy_next_upstream error timeout;  # what has been sent to one server is not sent to another one
    }}
  }}
}}
"""


@contextlib.contextmanager
def balanced(decodes: Sequence[Server], folder: Path) -> Iterator[str]:
    """Start nginx; yields its URL, without a path.

    Raises:
        ServerError: it is not installed, or did not start.
    """
    program = shutil.which("nginx")
    if program is None:
        raise ServerError("found no nginx; expected it in PATH. Nothing can be asked through it. Install nginx.")
    folder.mkdir(parents=True, exist_ok=True)
    (port,) = free_ports(1)
    servers = " ".join(f"server {HOST}:{one.port};" for one in decodes)
    config = folder / "nginx.conf"
    config.write_text(NGINX.format(folder=folder, servers=servers, host=HOST, port=port))
    with running([program, "-c", str(config)], folder / "nginx.log", port, "/health") as url:
        yield url
