# SPDX-License-Identifier: Apache-2.0
"""Does a registration follow kvcached's pages? Found out before anything is served, over what would carry it.

find      asked by a worker or a person: an answer of before, or a prover
  │
__main__  the prover, a process of its own: nothing of a server's is touched, and what it loads is loaded once
  │ forks
member    two a lane: one with kvcached's pages, one with ordinary memory, each with a NIXL agent of its own
  │
lanes     what UCX could choose on this host, and how to have it choose one of them alone
  │
result    what was found of each lane
"""
