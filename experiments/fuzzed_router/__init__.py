# SPDX-License-Identifier: Apache-2.0
"""See ``__main__.py``."""
