# SPDX-License-Identifier: Apache-2.0
"""ENTER: a router for X prefill and Y decode servers, ``kvcached-nixl proxy``. A process of its own; no vLLM, no torch.

    app          what is answered where            once per process
    fleet        which servers there are           instance, health, connections: once per server
    ask          what a client wants, and what the two servers are asked
    journey      one request: attempts, legs, what becomes of them
    outgoing     what the client hears

One event loop, one thread. What waits has a limit (`guard`), what fails has a cause (`failure`).
"""
