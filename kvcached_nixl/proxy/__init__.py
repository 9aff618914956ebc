# SPDX-License-Identifier: Apache-2.0
"""The router for X prefill and Y decode servers, ``kvcached-nixl proxy``. A separate process, without vLLM and torch.

    command, listener    the process, and its HTTP server         once per process
    app                  the HTTP endpoints                       once per process
    account              what may be used: memory, descriptors    once per process
    fleet, health        the known servers, and their checks      once per process
    upstream             the HTTP client for the servers          once per process
    instance             one server, with its health and load     once per server
    kind, policy, cost   which servers fit, which one is chosen, and when decode computes alone
    api                  what differs between the endpoints
    request_body         reads a client's body (`body_fields`) into a request (`asked`)
    leg_body             makes the bodies for prefill and decode
    request_flow         one request: its attempts, in each direction, and its result
    server_choice        which servers one request goes to; waits while none is up
    legs                 the legs of one request
    relay, events        the leg whose response goes to the client
    client               the client's request, and the response to it

One event loop, one thread. Every wait has a time limit (`cancel_scope`), every failure has a cause (`failure`).
"""
