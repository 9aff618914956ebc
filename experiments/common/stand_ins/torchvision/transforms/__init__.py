# SPDX-License-Identifier: Apache-2.0
"""Names that transformers imports."""

from enum import Enum

from torchvision.transforms import functional, v2

__all__ = ["InterpolationMode", "functional", "v2"]


class InterpolationMode(Enum):
    NEAREST = "nearest"
    NEAREST_EXACT = "nearest-exact"
    BILINEAR = "bilinear"
    BICUBIC = "bicubic"
    BOX = "box"
    HAMMING = "hamming"
    LANCZOS = "lanczos"
