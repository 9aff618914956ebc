# SPDX-License-Identifier: Apache-2.0
"""Do other projects' stacks get right answers, and errors when servers die?"""
