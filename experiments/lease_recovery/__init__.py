# SPDX-License-Identifier: Apache-2.0
"""What do clients get when servers die, freeze or respond late, and how soon does the pair recover?"""
