#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# What servers do with kv_transfer_params that nobody should send. --help explains.
exec bash "$(dirname "${BASH_SOURCE[0]}")/../run.sh" fuzzed_parameters "$@"
