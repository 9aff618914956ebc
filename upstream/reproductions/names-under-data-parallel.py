# SPDX-License-Identifier: Apache-2.0
"""The engine cores of two data-parallel ranks, which are one process group, have sockets of their own."""

import multiprocessing
import sys
import types
from types import SimpleNamespace

from kvcached.integration.vllm import interfaces, patches


class EngineCore:
    """vLLM's, as far as it is asked."""

    def __init__(self, vllm_config):
        pass


def engine_core(index, answer):
    module = types.ModuleType("vllm.v1.engine.core")
    module.EngineCore = EngineCore
    interfaces.init_kvcached = lambda **options: None
    patches._should_enable_async_sched = lambda vllm_config: False
    EngineCore._kvcached_install_ordered_unmap = lambda self: None
    patches.EngineCorePatch().patch_engine_init(module)
    EngineCore._kvcached_install_ordered_unmap = lambda self: None
    parallel = SimpleNamespace(
        data_parallel_size=2, data_parallel_index=index, pipeline_parallel_size=1, tensor_parallel_size=1
    )
    EngineCore(SimpleNamespace(parallel_config=parallel))
    # What a worker that this process starts would bind.
    started = multiprocessing.get_context("spawn").Process(target=worker, args=(answer,))
    started.start()
    started.join()


def worker(answer):
    from kvcached.tp_ipc_util import get_worker_socket_path

    answer.put(get_worker_socket_path(0))


if __name__ == "__main__":
    spawn = multiprocessing.get_context("spawn")
    answer = spawn.Queue()
    cores = [spawn.Process(target=engine_core, args=(index, answer)) for index in range(2)]
    for one in cores:
        one.start()
    found = sorted(answer.get(timeout=120).rpartition("/kvcached-tp-")[2] for _ in cores)
    for one in cores:
        one.join()
    what = "share the socket" if found[0] == found[1] else "have the sockets"
    print(f"the workers of two data-parallel ranks {what} {' and '.join(dict.fromkeys(found))}")
    sys.exit(found[0] == found[1])
