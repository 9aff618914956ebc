# SPDX-License-Identifier: Apache-2.0
"""The router for X prefill and Y decode servers, ``kvcached-nixl proxy``. A separate process, without vLLM and torch.

    app            the HTTP endpoints                         once per process
    fleet          the known servers                          once per process
    instance       one server, with its health and connections: once per server
    request_body   reads a client's body, and makes the bodies for prefill and decode
    request_flow   one request: its attempts, legs and result
    outgoing       the response to the client

One event loop, one thread. Every wait has a time limit (`cancel_scope`), every failure has a cause (`failure`).
"""
