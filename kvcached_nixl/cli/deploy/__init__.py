# SPDX-License-Identifier: Apache-2.0
"""``doctor --deploy``: what of a server's environment and command line is wrong, before it is started."""
