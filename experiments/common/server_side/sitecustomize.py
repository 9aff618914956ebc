# SPDX-License-Identifier: Apache-2.0
"""Imported by Python at the start of every process of the experiments' servers; variables say which hooks it sets.

**Few cores** (EXPERIMENT_FEW_CORES): no thread busy-waits, and no two servers are pinned to one core. NIXL's progress
thread polls its sockets without a pause: NIXL's Python API passes a delay of 0 to its C++ agent and offers no way to
change it. That keeps one core per engine busy, so with two engines on two cores every measurement is mostly waiting
for a core. With a delay, the same thread sleeps in the same poll until an event arrives. vLLM's NIXL connector pins
the main thread of a CPU worker to the last core of its NUMA node, away from the OpenMP threads that compute. Without
such threads (``VLLM_CPU_OMP_THREADS_BIND=nobind``, one thread) the main thread computes, and all servers of a machine
would compute on that one core.

**Forks** (EXPERIMENT_FORK): most of a server's start is importing vLLM, and on a CPU every process that it spawns
imports vLLM again.

**Triton** (TRITON_INTERPRET): vLLM's model runner V2 is built on Triton. vLLM's CPU build has that runner, too, but
refuses it unless Triton lists a backend "cpu". When kernels are interpreted, Triton never calls it: an empty one will
do.

**Drafts** (EXPERIMENT_DRAFTS): lets vLLM's CPU build compute a gated delta net that has drafts. The block of a
request's state is then taken from a table with several columns. Torch takes a single such index for contiguous,
whatever its stride is, and the kernel refuses its stride.

**Stages** (EXPERIMENT_STAGES): lets runner V1 of vLLM's CPU build run pipeline stages. A stage makes the tensors that
it receives when it measures its memory, which is not done on a CPU.
"""

from __future__ import annotations

import os
from typing import Any

BINDINGS = ("nixl_cu12._bindings", "nixl_cu13._bindings")
WAIT_MICROSECONDS = 10000


def wait_for_events(bindings: Any) -> None:
    """Make progress threads of agents created later wait for events, at most ``WAIT_MICROSECONDS`` at a time."""
    make_agent = bindings.nixlAgent

    def agent(name: str, configuration: Any) -> Any:
        configuration.pthrDelay = WAIT_MICROSECONDS
        return make_agent(name, configuration)

    bindings.nixlAgent = agent


def use_every_core() -> None:
    """Disable pinning: threads of this process stay where the kernel's scheduler puts them."""
    os.sched_setaffinity = lambda pid, mask: None


def fork_processes(system_utils: Any) -> None:
    import multiprocessing

    system_utils.get_mp_context = lambda: multiprocessing.get_context("fork")


def name_a_cpu_backend(backends: Any) -> None:
    nothing = type("Backend", (), {"driver": None, "compiler": None})
    backends.backends.setdefault("cpu", nothing)


def copy_indices(custom_ops: Any) -> None:
    compute = custom_ops.fused_sigmoid_gating_delta_rule_update_cpu

    def computed(*, initial_state_indices: Any, **arguments: Any) -> Any:
        own = initial_state_indices.new_empty(initial_state_indices.shape).copy_(initial_state_indices)
        return compute(initial_state_indices=own, **arguments)

    custom_ops.fused_sigmoid_gating_delta_rule_update_cpu = computed


def make_received_tensors(runner: Any) -> None:
    gather = runner.GPUModelRunner.sync_and_gather_intermediate_tensors

    def gathered(self: Any, *arguments: Any) -> Any:
        if self.intermediate_tensors is None:
            self.intermediate_tensors = self.model.make_empty_intermediate_tensors(
                batch_size=self.max_num_tokens, dtype=self.model_config.dtype, device=self.device
            )
        return gather(self, *arguments)

    runner.GPUModelRunner.sync_and_gather_intermediate_tensors = gathered


HOOKS = (
    ("TRITON_INTERPRET", "triton.backends", name_a_cpu_backend),
    ("EXPERIMENT_FORK", "vllm.utils.system_utils", fork_processes),
    *(("EXPERIMENT_FEW_CORES", name, wait_for_events) for name in BINDINGS),
    ("EXPERIMENT_DRAFTS", "vllm._custom_ops", copy_indices),
    ("EXPERIMENT_STAGES", "vllm.v1.worker.gpu_model_runner", make_received_tensors),
)
if os.environ.get("EXPERIMENT_FEW_CORES"):
    use_every_core()
for variable, module, hook in HOOKS:
    if os.environ.get(variable):
        import wrapt

        wrapt.register_post_import_hook(hook, module)
