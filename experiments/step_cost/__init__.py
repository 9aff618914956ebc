# SPDX-License-Identifier: Apache-2.0
"""What do hand-overs that wait cost a step of the engine, and a turn of the transfer thread?"""
