# SPDX-License-Identifier: Apache-2.0
"""Refuses images."""


def pil_to_tensor(*_: object) -> None:
    raise NotImplementedError("this stands in for torchvision, and has no images")
