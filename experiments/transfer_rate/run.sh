#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# A hand-over of 64k tokens against plain NIXL with the same descriptors. --help explains.
exec bash "$(dirname "${BASH_SOURCE[0]}")/../run.sh" transfer_rate "$@"
