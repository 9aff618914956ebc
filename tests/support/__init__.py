# SPDX-License-Identifier: Apache-2.0
"""Helpers of the tests: engines, peers, servers, and programs that tests run. pytest collects nothing here."""

from pathlib import Path

FOLDER = Path(__file__).parent
"""Where the programs are that tests run by their path."""
