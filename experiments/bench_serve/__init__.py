# SPDX-License-Identifier: Apache-2.0
"""What does vLLM's own load generator, ``vllm bench serve``, measure with prefill/decode?"""
