#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Measures the cost of staging, and the memory that it frees sooner. --help explains.
exec bash "$(dirname "${BASH_SOURCE[0]}")/../run.sh" memory_path "$@"
