# SPDX-License-Identifier: Apache-2.0
"""One hand-over of KV, in two directions: decode READs what prefill keeps, or prefill WRITEs what decode registered.

    commands      what crosses between the engine's thread and the transfer thread
    engine_side   on the engine's thread: vLLM's steps in, what has ended out
    thread        the transfer thread: everything that touches the NIXL agent happens on it
    receiving     decode: what its requests wait for, and their ends
    attempt       decode: one request's attempt, with a share for each rank of prefill that has a part of its bytes
    reading       decode: a share that it READs itself
    registering   decode: a share that prefill WRITEs
    writers       decode: who may still write, and how that ends
    gates         decode: what it is written through, and how one that is not heard of is kept from it
    host          both: which process this is, and whether another one of this host has ended
    serving       prefill: what is offered, who asked for it, when its blocks are free
    pairing       prefill: which registration is served from which offer
    offer         prefill: one request that is offered
    writing       prefill: one registration that is being written
    entrances     prefill: the gates that it writes through
    posting       both: READs and WRITEs, as many bytes in flight as there is room for
    peers         both: ranks of other engines, from the handshake to their end
    meeting       both: what a handshake found out, and whether two ranks may exchange KV
    verification  both: words that say which hand-overs prefill still keeps
    lease         both: leases that prefill grants and decode renews
    start         puts them together, once per process

Glossary (README.md has it, too): an *offer* is a request of prefill whose KV decode may have; a *registration* are
blocks of decode that prefill may write; an *attempt* is one request of decode's, from its blocks' allocation to the
last byte in flight, and a *share* the part of it that one rank of prefill has; a *word* is 64 bits that stand for a
manifest, there for as long as the blocks are kept; a *beat* renews leases; a *hold* are blocks that vLLM does not know
of, kept for what may still be in flight; those that a peer might still touch which is not heard of are in *quarantine*.
A *gate* is what decode is written through; to *fence* a writer is to close it.
"""
