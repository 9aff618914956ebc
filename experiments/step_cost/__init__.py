# SPDX-License-Identifier: Apache-2.0
"""What do waiting hand-overs cost a step of the engine, and a turn of the transfer thread?"""
