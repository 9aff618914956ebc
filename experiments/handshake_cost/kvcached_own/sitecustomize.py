# SPDX-License-Identifier: Apache-2.0
"""kvcached with the NIXL patch it brings, without this package's: only its host memory is made to work."""

from kvcached_nixl.hostvmm import activate

activate()
