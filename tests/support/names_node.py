# SPDX-License-Identifier: Apache-2.0
"""Run by test_names.py: one process of an engine, on the real kvcached over host memory.

argv: ``core`` or ``worker``, and ``ours`` or ``stock``. Reads each command as a line of JSON and answers with one.

    core     name             -> the name that its workers must use
             manage           -> creates the KV cache manager; needs a running worker
             take COUNT       -> how many blocks it got
             end              -> shuts kvcached down, as vLLM's engine core does
    worker   name NAME        -> listens under that name, and allocates its KV tensors
             maps             -> how often its pages were mapped since it started
"""

from __future__ import annotations

import json
import os
import sys
from types import SimpleNamespace
from typing import Any

import torch
from hostvmm.device import device_info

from kvcached_nixl.errors import NameRefused
from kvcached_nixl.vllm.patches import naming

LAYERS, BLOCK_SIZE, HEADS, WIDTH, BLOCKS = 2, 16, 8, 128, 512


class Node:
    def __init__(self, role: str, whose: str) -> None:
        from kvcached.integration.vllm import interfaces

        self.kvcached = interfaces
        self.is_ours = whose == "ours"
        self.executor = SimpleNamespace  # any object that allows weak references
        if role == "core":
            interfaces.init_kvcached(is_worker=False, device="cuda:0")

    def name(self, name: str | None = None) -> str | None:
        parallel = SimpleNamespace(
            distributed_executor_backend="mp",
            world_size=1,
            nnodes_within_dp=1,
            data_parallel_rank_local=None,
            data_parallel_size=1,
            data_parallel_index=0,
        )
        config = SimpleNamespace(parallel_config=parallel)
        if name is None:
            if self.is_ours:
                naming.own_engine(self.executor, config)
            return vars(config).get(naming._RIDES, "stock")
        if self.is_ours:
            config.kvcached_nixl_name = name
            naming.join_engine(config)
        self.kvcached.init_kvcached(is_worker=True, device="cuda:0")
        shape = (BLOCKS, HEADS, BLOCK_SIZE, 2 * WIDTH)
        self.tensors = self.kvcached.alloc_kv_cache(shape, BLOCK_SIZE, torch.float32, "cuda", LAYERS)
        return name

    def manage(self) -> bool:
        self.manager = self.kvcached.get_kv_cache_manager(
            BLOCKS, BLOCK_SIZE, HEADS * 2 * WIDTH * 4, LAYERS, num_kv_buffers=1
        )
        return self.manager.alloc(1) is not None  # waits for the worker's tensors

    def take(self, count: int) -> int:
        return len(self.manager.alloc(count))

    def maps(self) -> int:
        return sum(one.maps for one in device_info().processes if one.pid == os.getpid())

    def end(self) -> bool:
        ended = bool(self.kvcached.shutdown_kvcached())
        if self.is_ours:
            naming.give_up_name()
        return ended


def main() -> None:
    node = Node(*sys.argv[1:])
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # kvcached prints to standard output
    for line in sys.stdin:
        what, *arguments = json.loads(line)
        try:
            answer: Any = getattr(node, what)(*arguments)
        except NameRefused as cause:
            answer = str(cause)
        print(json.dumps(answer), file=answers, flush=True)
    os._exit(0)  # as vLLM's processes do, so no destructor runs


if __name__ == "__main__":
    main()
