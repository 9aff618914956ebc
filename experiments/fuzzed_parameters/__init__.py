# SPDX-License-Identifier: Apache-2.0
"""How do servers handle malformed ``kv_transfer_params`` and malformed requests around them?"""
