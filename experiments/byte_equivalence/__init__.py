# SPDX-License-Identifier: Apache-2.0
"""Does prefill/decode over kvcached give byte for byte what one stock instance gives?"""
