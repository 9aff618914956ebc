# SPDX-License-Identifier: Apache-2.0
"""What is elastic memory with prefill/decode worth, on one device that is smaller than the sum of all peaks?"""
