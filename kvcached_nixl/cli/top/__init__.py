# SPDX-License-Identifier: Apache-2.0
"""``kvcached-nixl top``: servers in a terminal, from their ``/metrics`` alone.

look       what one answer of ``/metrics`` said, and what a server's last two say of it
command    asks the servers, and shows them: once, or live
"""
