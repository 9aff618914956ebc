#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Runs vLLM's own load generator against prefill/decode, and against one instance. --help explains.
exec bash "$(dirname "${BASH_SOURCE[0]}")/../run.sh" bench_serve "$@"
