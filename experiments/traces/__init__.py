# SPDX-License-Identifier: Apache-2.0
"""Do the spans of a request account for its time to first token?"""
