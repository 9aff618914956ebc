# SPDX-License-Identifier: Apache-2.0
"""Runs each case of `support.memory_pressure_cases`. test_planted_faults.py runs some of them with planted faults."""

from support.memory_pressure_cases import *  # noqa: F403
