# SPDX-License-Identifier: Apache-2.0
"""Whose pages: one kvcached name for each engine, and proof of who owns what lies under it.

kvcached calls its sockets, its shared-memory segment and its account by one name, which it takes from the environment
(``KVCACHED_IPC_NAME``) or makes from the process group. Two engines with one name answer at one socket, and pages are
mapped in the wrong worker. So that name is a wish here: `name` makes an engine's own from it, `claim` makes it that
engine's for as long as one of its processes lives, and clears what dead engines have left. Knows nothing of vLLM.
"""
