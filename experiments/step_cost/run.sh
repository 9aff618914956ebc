#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Measures the cost of waiting hand-overs for an engine's step, for several numbers of them. --help explains.
exec bash "$(dirname "${BASH_SOURCE[0]}")/../run.sh" step_cost "$@"
