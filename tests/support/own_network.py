# SPDX-License-Identifier: Apache-2.0
"""A network of a process's own, with nothing but the addresses that a test gives it.

What listens at 0.0.0.0 in there is reached by nobody outside.
"""

from __future__ import annotations

import ctypes
import fcntl
import os
import socket
import struct
import subprocess
import sys
from pathlib import Path

import pytest

__all__ = ["enter", "run"]

_NEW_NETWORK, _NEW_USER = 0x40000000, 0x10000000
_SET_FLAGS, _SET_ADDRESS = 0x8914, 0x8916
_TESTS = Path(__file__).resolve().parents[1]


def enter(*addresses: str) -> bool:
    """Moves this process, which must have one thread, into a new network that has these and 127.0.0.1.

    Returns whether the system allows that.
    """
    if ctypes.CDLL(None, use_errno=True).unshare(_NEW_NETWORK | _NEW_USER):
        return False
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
        fcntl.ioctl(any_socket, _SET_FLAGS, struct.pack("16sH22x", b"lo", 1))
        for number, address in enumerate(addresses, 1):
            there = struct.pack("HH4s8x", socket.AF_INET, 0, socket.inet_aton(address))
            fcntl.ioctl(any_socket, _SET_ADDRESS, struct.pack("16s", b"lo:%d" % number) + there)
    return True


def run(code: str, *addresses: str, **environ: str) -> str:
    """Runs Python code in a process with such a network. Returns its output; skips the test if that is not allowed."""
    begin = f"import sys; from support.own_network import enter\nif not enter(*{addresses!r}): sys.exit(77)\n"
    path = os.pathsep.join(map(str, (_TESTS.parent, _TESTS)))
    done = subprocess.run(
        [sys.executable, "-c", begin + code],
        env={**os.environ, "PYTHONPATH": path, **environ},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    if done.returncode == 77:
        pytest.skip("this system does not let a process have a network of its own")
    assert done.returncode == 0, done.stderr
    return done.stdout
