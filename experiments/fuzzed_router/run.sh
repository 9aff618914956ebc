#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# What the router makes of requests that nobody should send. --help explains.
exec bash "$(dirname "${BASH_SOURCE[0]}")/../run.sh" fuzzed_router "$@"
