# SPDX-License-Identifier: Apache-2.0
"""Stands in for torchvision, which vLLM's modules of Qwen import for images, where none fits the installed torch.

Has the names that transformers imports, those of `io` from 5.19 on. A text model calls nothing of it. A model with
images works if they have three colours and need not be resized.
"""

from __future__ import annotations

import sys
from enum import Enum
from importlib.machinery import ModuleSpec
from importlib.util import module_from_spec
from types import ModuleType
from typing import Any


class InterpolationMode(Enum):
    NEAREST = "nearest"
    NEAREST_EXACT = "nearest-exact"
    BILINEAR = "bilinear"
    BICUBIC = "bicubic"
    BOX = "box"
    HAMMING = "hamming"
    LANCZOS = "lanczos"


class ImageReadMode(Enum):
    RGB = "RGB"


def pil_to_tensor(image: Any) -> Any:
    import numpy
    import torch

    return torch.from_numpy(numpy.array(image)).permute(2, 0, 1).contiguous()


def normalize(image: Any, mean: Any, std: Any, inplace: bool = False) -> Any:
    import torch

    mean, std = (torch.as_tensor(one, dtype=image.dtype).view(-1, 1, 1) for one in (mean, std))
    return (image - mean) / std


def refuse(*_: object, **__: object) -> None:
    raise NotImplementedError("this stands in for torchvision, and neither reads nor resizes images")


def _module(name: str, **content: object) -> ModuleType:
    """Make a module that ``import`` finds, below this one."""
    made = sys.modules[f"{__name__}.{name}"] = module_from_spec(ModuleSpec(f"{__name__}.{name}", None))
    vars(made).update(content)
    return made


io = _module("io", ImageReadMode=ImageReadMode, decode_image=refuse)
functional = {"normalize": normalize, "pil_to_tensor": pil_to_tensor, "resize": refuse}
transforms = _module(
    "transforms",
    InterpolationMode=InterpolationMode,
    functional=_module("transforms.functional", **functional),
    v2=_module("transforms.v2", functional=_module("transforms.v2.functional", **functional)),
)
