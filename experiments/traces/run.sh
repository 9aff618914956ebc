#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Adds up the spans of requests through decode and prefill. --help explains.
exec bash "$(dirname "${BASH_SOURCE[0]}")/../run.sh" traces "$@"
