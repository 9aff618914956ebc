#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Compares a hand-over of 64k tokens with plain NIXL on the same descriptors. --help explains.
exec bash "$(dirname "${BASH_SOURCE[0]}")/../run.sh" transfer_rate "$@"
