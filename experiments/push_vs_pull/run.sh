#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Compares time to first token of push and pull, over shared memory and over TCP. --help explains.
exec bash "$(dirname "${BASH_SOURCE[0]}")/../run.sh" push_vs_pull "$@"
