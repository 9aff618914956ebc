#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Compares kvcached P/D with stock, byte for byte, and sets up everything for that. --help explains.
exec bash "$(dirname "${BASH_SOURCE[0]}")/../run.sh" byte_equivalence "$@"
