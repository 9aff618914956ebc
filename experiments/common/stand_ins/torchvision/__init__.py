# SPDX-License-Identifier: Apache-2.0
"""Stands in for torchvision, which vLLM's module of Qwen3.5 imports for images, where none fits the installed torch.

A text model calls nothing of it.
"""

from torchvision import io, transforms

__all__ = ["io", "transforms"]
