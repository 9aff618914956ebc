# SPDX-License-Identifier: Apache-2.0
"""The cases of `support.hand_over_cases`, each by itself. With planted faults: test_planted_faults.py."""

from support.hand_over_cases import *  # noqa: F403
