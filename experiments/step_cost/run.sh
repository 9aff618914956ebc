#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# What waiting hand-overs cost a step, by how many wait. --help explains.
exec bash "$(dirname "${BASH_SOURCE[0]}")/../run.sh" step_cost "$@"
