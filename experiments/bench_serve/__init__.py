# SPDX-License-Identifier: Apache-2.0
"""What vLLM's own load generator measures through the router."""
