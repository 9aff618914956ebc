# SPDX-License-Identifier: Apache-2.0
"""What this package patches and reads of vLLM, per release: how a fixture is made, read and judged."""
