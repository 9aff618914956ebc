# SPDX-License-Identifier: Apache-2.0
"""Does a memory registration follow kvcached's pages? Tested before serving, over each transport that could carry KV.

find      called by a worker or the doctor command: returns a stored proof, or starts a prover
  │
__main__  the prover, a separate process: it does not touch the server's state, and loads libraries once for its forks
  │ forks
member    two per lane: one with kvcached's pages, one with ordinary memory, each with its own NIXL agent
  │
lanes     which transports UCX could choose on this host, and how to make it use one of them alone
  │
result    what was found of each lane
"""
