# SPDX-License-Identifier: Apache-2.0
"""One kvcached name per engine, and a lock that shows which engine owns the files under that name.

kvcached uses one name for its sockets, its shared-memory segment and its memory accounting. It takes the name from the
environment (``KVCACHED_IPC_NAME``) or derives it from the process group. Two engines with the same name answer at the
same socket, and pages are mapped in the wrong worker. So this package treats that name as a prefix: `name` makes a
unique name per engine from it, and `claim` reserves that name while a process of the engine lives and removes what dead
engines left behind. Knows nothing of vLLM.
"""
