# SPDX-License-Identifier: Apache-2.0
"""What does a hand-over cost, beside stock vLLM, plain NIXL, or another way of handing over?"""
