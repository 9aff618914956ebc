# SPDX-License-Identifier: Apache-2.0
"""What staging costs and what it gives back, beside the direct path."""
