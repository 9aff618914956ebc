#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# What heartbeats cost a step, by how many requests wait. --help explains.
exec bash "$(dirname "${BASH_SOURCE[0]}")/../run.sh" heartbeat_cost "$@"
