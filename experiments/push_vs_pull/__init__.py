# SPDX-License-Identifier: Apache-2.0
"""How much sooner does a client have its first token when prefill pushes, and what is left of the transfer?"""
