# SPDX-License-Identifier: Apache-2.0
"""Do hand-over cost and engine memory stay flat over many hand-overs, while engines restart and disappear?"""
