# SPDX-License-Identifier: Apache-2.0
"""The smallest pool that can work."""

from __future__ import annotations

import math
import re

import pytest
from hostvmm.errors import HostvmmError
from hostvmm.geometry import Pool
from hypothesis import given
from hypothesis import strategies as st

MIB = 2**20


def pool(device_mib: float, *, layers: int = 4, kv_buffers: int = 2, contiguous: bool = True) -> Pool:
    return Pool(int(device_mib * MIB), 2 * MIB, layers, kv_buffers, contiguous, 0.95)


@pytest.mark.parametrize("contiguous", [True, False])
@given(device_mib=st.integers(1, 4096), layers=st.integers(1, 40), kv_buffers=st.sampled_from([1, 2]))
def test_a_pool_is_refused_exactly_when_no_page_group_fits(
    contiguous: bool, device_mib: int, layers: int, kv_buffers: int
) -> None:
    """The refusal and kvcached's own count of free page groups agree, after the zero page is taken."""
    subject = pool(device_mib, layers=layers, kv_buffers=kv_buffers, contiguous=contiguous)
    free_bytes = subject.device_bytes - subject.zero_page_bytes
    headroom_bytes = int(subject.device_bytes * (1.0 - 0.95))
    # As kvcached counts: pages first, then whole layers, then whole buffers.
    groups = max(free_bytes - headroom_bytes, 0) // (2 * MIB) // layers // kv_buffers
    assert subject.usable_bytes == groups * subject.page_group_bytes
    if groups:
        subject.refuse_if_too_small()
    else:
        with pytest.raises(HostvmmError, match="KVCACHED_HOSTVMM_GIB"):
            subject.refuse_if_too_small()


@given(layers=st.integers(1, 80), kv_buffers=st.sampled_from([1, 2]), contiguous=st.booleans())
def test_the_size_a_refusal_recommends_is_accepted(layers: int, kv_buffers: int, contiguous: bool) -> None:
    """A pool of the recommended size starts."""
    with pytest.raises(HostvmmError) as refusal:
        pool(2, layers=layers, kv_buffers=kv_buffers, contiguous=contiguous).refuse_if_too_small()
    recommended = re.search(r"KVCACHED_HOSTVMM_GIB to ([0-9.]+)", refusal.value.remedy)
    assert recommended is not None
    device_mib = math.floor(float(recommended[1]) * 1024 / 2) * 2
    pool(device_mib, layers=layers, kv_buffers=kv_buffers, contiguous=contiguous).refuse_if_too_small()
