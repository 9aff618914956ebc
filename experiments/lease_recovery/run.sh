#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Faults in a pair that serves: what clients get, and how soon it is over. --help explains.
exec bash "$(dirname "${BASH_SOURCE[0]}")/../run.sh" lease_recovery "$@"
