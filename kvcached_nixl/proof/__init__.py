# SPDX-License-Identifier: Apache-2.0
"""Does a memory registration follow kvcached's pages? Tested before serving, over each transport that could carry KV.

A worker, or the doctor command, calls `find.find`. That returns a stored proof, or starts the prover (`__main__`), a
process of its own, which forks two members for each lane: one with kvcached's pages, one with ordinary memory.
"""
