# SPDX-License-Identifier: Apache-2.0
"""Does a hand-over cost the same, and an engine keep the same, however many were before and whoever came and went?"""
