# SPDX-License-Identifier: Apache-2.0
"""Imported by Python at the start of every process of the experiments' servers."""

import os

if os.environ.get("TRITON_INTERPRET"):
    import triton_kernels
    import wrapt

    wrapt.register_post_import_hook(triton_kernels.name_a_cpu_backend, "triton.backends")
if os.environ.get("EXPERIMENT_FORK"):
    import few_cores
    import wrapt

    wrapt.register_post_import_hook(few_cores.fork_processes, "vllm.utils.system_utils")
if os.environ.get("EXPERIMENT_FEW_CORES"):
    import few_cores
    import wrapt

    few_cores.use_every_core()
    for name in few_cores.BINDINGS:
        wrapt.register_post_import_hook(few_cores.wait_for_events, name)
if os.environ.get("EXPERIMENT_DRAFTS"):
    import cpu_drafts
    import wrapt

    wrapt.register_post_import_hook(cpu_drafts.copy_indices, "vllm._custom_ops")
