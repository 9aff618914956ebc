#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Measures the cost of a pair's first hand-over with 1, 8 and 60 GiB reserved. --help explains.
exec bash "$(dirname "${BASH_SOURCE[0]}")/../run.sh" handshake_cost "$@"
