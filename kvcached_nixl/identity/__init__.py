# SPDX-License-Identifier: Apache-2.0
"""What computed the KV, by content: weights, configuration, adapters (rule R11). Imports neither vLLM nor NIXL."""
