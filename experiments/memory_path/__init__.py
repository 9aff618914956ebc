# SPDX-License-Identifier: Apache-2.0
"""What does staging cost compared with the direct path, and how much memory does it free sooner?"""
