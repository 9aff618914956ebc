# SPDX-License-Identifier: Apache-2.0
"""How UCX's output is read, and how UCX is made to use one transport alone."""

from __future__ import annotations

import pytest

from kvcached_nixl.proof.result import Ucx, _resources, carriers, is_never_chosen, transports_of

PRINTED = """\
#            md 0  :  component 0  self
#      resource 0  :  md 0  dev 0  flags -- self/memory
#      resource 1  :  md 1  dev 1  flags -- tcp/eth0
#      resource 2  :  md 1  dev 2  flags -- tcp/lo
#      resource 3  :  md 4  dev 0  flags -- cma/memory
#      resource 4  :  md 5  dev 3  flags -- rc_mlx5/mlx5_0:1
#      resource 5  :  md 6  dev 4  flags -- cuda_ipc/cuda
"""


def test_each_transport_is_named_once_and_what_has_one_end_is_none() -> None:
    assert Ucx("1.19.0", _resources(PRINTED)).lanes == ("tcp", "cma", "rc_mlx5", "cuda_ipc")
    assert Ucx("1.19.0", _resources("#\n# UCP context\n#\n")).lanes == ()


@pytest.mark.parametrize(
    ("lane", "device", "alone"),
    [
        ("tcp", "cpu", "tcp"),
        ("cma", "cpu", "cma,tcp"),
        ("tcp", "cuda", "tcp,cuda_copy"),
        ("cuda_ipc", "cuda", "cuda_ipc,cuda_copy,tcp"),
        ("rc_mlx5", "cuda", "rc_mlx5,ud_verbs:aux,ud_mlx5:aux,cuda_copy"),
        ("what comes next", "cpu", "what comes next"),
    ],
)
def test_a_transport_is_used_alone_with_what_it_needs(lane: str, device: str, alone: str) -> None:
    first, second = transports_of(lane, device)
    assert first == alone
    assert second.split(",").count("tcp") == 1 and set(alone.split(",")) <= set(second.split(","))


CHOSEN = """\
2026-11-23 17:00:18 NIXL INFO    _api.py:405 Backend UCX was instantiated
[1795453218.9] [host:22880:0]   +--------+-------------+-----------------------------------+
[1795453218.9] [host:22880:0]   | 155a60af46ad45aeb0649326c83c6c9 self cfg#0               |
[1795453218.9] [host:22880:0]   | remote memory write by ucp_put* from host memory to host |
[1795453218.9] [host:22880:0]   +--------+-------------+-----------------------------------+
[1795453218.9] [host:22880:0]   | Range  | Description |              Config               |
[1795453218.9] [host:22880:0]   +--------+-------------+-----------------------------------+
[1795453218.9] [host:22880:0]   | 0..inf | zero-copy   | rc_mlx5/mlx5_0:1                  |
[1795453218.9] [host:22880:0]   +--------+-------------+-----------------------------------+
[1795453219.0] [host:22880:0]   | 155a60af46ad45aeb0649326c83c6c9 intra-node cfg#1         |
[1795453219.0] [host:22880:0]   | remote memory write by ucp_put* from host memory to host |
[1795453219.0] [host:22880:0]   | Range  | Description |              Config               |
[1795453219.0] [host:22880:0]   | 0..512 | short       | cma/memory                        |
[1795453219.0] [host:22880:0]   | 0..inf | zero-copy   | 52% on tcp/lo and 48% on tcp/eth0 |
[1795453219.1] [host:22880:0]   | 155a60af46ad45aeb0649326c83c6c9 intra-node cfg#1         |
[1795453219.1] [host:22880:0]   | active message by ucp_am_send* from host memory          |
[1795453219.1] [host:22880:0]   | Range  | Description |              Config               |
[1795453219.1] [host:22880:0]   |   0    | short       | posix/memory                      |
"""


CHOSEN_BEFORE = """\
[1795454485.2] [host:28313:0] | ucp_context_0 self cfg#0 | remote memory write by ucp_put* from host memory to host |
[1795454485.2] [host:28313:0] |                   0..inf | zero-copy                         | rc_mlx5/mlx5_0:1      |
[1795454485.2] [host:28313:0] | ucp_context_0 intra-node cfg#1 | remote memory read by ucp_get*(multi) into host |
[1795454485.2] [host:28313:0] |                         0..inf | zero-copy                    | cma/memory      |
[1795454485.2] [host:28313:0] | ucp_context_0 intra-node cfg#1 | active message by ucp_am_send* from host memory |
[1795454485.2] [host:28313:0] |                        1..8184 | zero-copy                    | tcp/eth0        |
"""


def test_what_has_carried_a_peers_bytes_is_read_off_what_ucx_says() -> None:
    """Not what it would use to itself, nor for its messages; as UCX 1.20 says it, and 1.18."""
    assert carriers(CHOSEN) == {"cma", "tcp"}
    assert carriers(CHOSEN_BEFORE) == {"cma"}
    assert carriers("") == frozenset()


def test_a_transport_that_ucx_rules_out_is_told_from_one_that_only_failed() -> None:
    said = "UCX  ERROR   no active messages transport to <no debug data>: posix/memory - no peer failure handler"
    assert is_never_chosen("posix", said)
    assert not is_never_chosen("rc_mlx5", said) and not is_never_chosen("posi", said)
    assert not is_never_chosen(
        "rc_mlx5", "no active messages transport to x: rc_mlx5/mlx5_0:1 - Destination is unreachable"
    )
