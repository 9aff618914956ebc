# SPDX-License-Identifier: Apache-2.0
"""Runs each case of `support.verified_hand_over_cases`. test_planted_faults.py runs them with planted faults."""

from support.verified_hand_over_cases import *  # noqa: F403
