# SPDX-License-Identifier: Apache-2.0
"""What vLLM and kvcached are, per version: paths, capabilities, private state by name."""
