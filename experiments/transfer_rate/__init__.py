# SPDX-License-Identifier: Apache-2.0
"""Which fraction of plain NIXL's rate does a long hand-over reach, with the same bytes in the same descriptors?"""
