#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Sends malformed kv_transfer_params to servers, and judges the answers. --help explains.
exec bash "$(dirname "${BASH_SOURCE[0]}")/../run.sh" fuzzed_parameters "$@"
