# SPDX-License-Identifier: Apache-2.0
"""SAY: what crosses between processes and peers. Pure data; no torch, no vLLM, no NIXL."""
