#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# What staging costs and what it gives back. --help explains.
exec bash "$(dirname "${BASH_SOURCE[0]}")/../run.sh" memory_path "$@"
