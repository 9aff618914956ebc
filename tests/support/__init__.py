# SPDX-License-Identifier: Apache-2.0
"""What tests share: engines, peers, servers, and programs that tests run. Nothing here is collected as a test."""

from pathlib import Path

FOLDER = Path(__file__).parent
"""Where the programs are that tests run by their path."""
