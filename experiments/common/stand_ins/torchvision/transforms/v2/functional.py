# SPDX-License-Identifier: Apache-2.0
"""As torchvision.transforms.functional."""

from torchvision.transforms.functional import normalize, pil_to_tensor, resize

__all__ = ["normalize", "pil_to_tensor", "resize"]
