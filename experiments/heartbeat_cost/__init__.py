# SPDX-License-Identifier: Apache-2.0
"""What do the heartbeats of many waiting requests cost a step?"""
