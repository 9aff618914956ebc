# SPDX-License-Identifier: Apache-2.0
"""What UCX prints, and how it is told to use one transport alone."""

from __future__ import annotations

import pytest

from kvcached_nixl.proof.lanes import _named, transports_of

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
    assert _named(PRINTED) == ("tcp", "cma", "rc_mlx5", "cuda_ipc")
    assert _named("#\n# UCP context\n#\n") == ()


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
