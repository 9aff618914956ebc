# SPDX-License-Identifier: Apache-2.0
"""What does the router cost, beside servers that are called directly and beside other proxies?"""
