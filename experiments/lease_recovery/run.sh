#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Inflicts faults on a serving pair: what clients get, and how soon it recovers. --help explains.
exec bash "$(dirname "${BASH_SOURCE[0]}")/../run.sh" lease_recovery "$@"
