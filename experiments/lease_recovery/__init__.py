# SPDX-License-Identifier: Apache-2.0
"""What do clients get when servers die, stand still or come late, and how soon is everything as before?"""
