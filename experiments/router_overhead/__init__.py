# SPDX-License-Identifier: Apache-2.0
"""What does the router add to a request, compared with calling servers directly and with other proxies?"""
