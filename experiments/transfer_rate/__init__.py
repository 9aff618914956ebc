# SPDX-License-Identifier: Apache-2.0
"""What does a long hand-over reach of what plain NIXL reaches with the same bytes in the same descriptors?"""
