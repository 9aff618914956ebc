#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Restarts, updates and kills servers while clients ask. --help explains.
exec bash "$(dirname "${BASH_SOURCE[0]}")/../run.sh" fleet_change "$@"
