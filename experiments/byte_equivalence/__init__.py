# SPDX-License-Identifier: Apache-2.0
"""Is the output of prefill/decode over kvcached identical to that of one stock instance, byte for byte?"""
