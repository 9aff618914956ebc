# SPDX-License-Identifier: Apache-2.0
"""How does the router handle malformed requests?"""
