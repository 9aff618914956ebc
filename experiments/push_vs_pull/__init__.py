# SPDX-License-Identifier: Apache-2.0
"""How much sooner does a client get its first token with push, and how much transfer is left after prefill?"""
