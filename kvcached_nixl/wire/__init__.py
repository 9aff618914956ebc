# SPDX-License-Identifier: Apache-2.0
"""The messages and records that cross between processes and between peers. Pure data; no torch, no vLLM, no NIXL."""
