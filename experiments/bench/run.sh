#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Measures what hand-overs cost; one of several questions. --help explains.
exec bash "$(dirname "${BASH_SOURCE[0]}")/../run.sh" bench "$@"
