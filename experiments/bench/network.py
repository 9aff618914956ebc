# SPDX-License-Identifier: Apache-2.0
"""A network namespace whose loopback has a rate limit: emulates a link between two machines on one machine.

Linux only. Needs the right to make a network namespace (CAP_SYS_ADMIN), ``unshare``, ``ip`` and ``tc``.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence

INSIDE = "EXPERIMENT_OWN_NETWORK"
APART = ("unshare", "--net", "--mount")


def enter(arguments: Sequence[str]) -> bool:
    """Restart this program in a new network namespace. Returns True inside it, False if it cannot be made."""
    if os.environ.get(INSIDE):
        return True
    commands = (
        # UCX looks for interfaces in /sys and needs one besides the loopback. Its traffic still uses the loopback.
        "mount -t sysfs none /sys",
        "ip link set lo up",
        "ip link add link0 type veth peer name link1",
        "ip addr add 192.0.2.1/24 dev link0",
        "ip link set link0 up",
        "ip link set link1 up",
        "tc qdisc add dev lo root pfifo",
    )
    set_up = " && ".join(commands)
    try:
        possible = subprocess.run([*APART, "bash", "-c", set_up], capture_output=True, check=False).returncode == 0
    except FileNotFoundError:
        possible = False
    if possible:
        again = [sys.executable, "-m", "experiments.bench", *arguments]
        os.environ[INSIDE] = "1"
        os.execvp(APART[0], [*APART, "bash", "-c", f'{set_up} && exec "$@"', "bash", *again])
    return False


def limit(gbit_per_second: float | None) -> None:
    """Set the loopback's rate limit, or remove it (None). Call it only inside the namespace."""
    rate = ["pfifo"] if gbit_per_second is None else f"tbf rate {gbit_per_second}gbit burst 256kb latency 20ms".split()
    subprocess.run(["tc", "qdisc", "replace", "dev", "lo", "root", *rate], check=True)
