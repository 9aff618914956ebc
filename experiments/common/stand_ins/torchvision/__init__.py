# SPDX-License-Identifier: Apache-2.0
"""Stands in for torchvision, which vLLM's modules of Qwen import for images, where none fits the installed torch.

A text model calls nothing of it. A model with images works if they need not be resized.
"""

from torchvision import io, transforms

__all__ = ["io", "transforms"]
