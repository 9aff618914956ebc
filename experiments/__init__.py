# SPDX-License-Identifier: Apache-2.0
"""Measurements and end-to-end comparisons; each folder answers one question with one command."""
