#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Time to first token, push against pull, over shared memory and over TCP. --help explains.
exec bash "$(dirname "${BASH_SOURCE[0]}")/../run.sh" push_vs_pull "$@"
