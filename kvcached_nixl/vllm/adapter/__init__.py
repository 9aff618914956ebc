# SPDX-License-Identifier: Apache-2.0
"""Knowledge of vLLM and kvcached per version: module paths, and access to private state by name."""
