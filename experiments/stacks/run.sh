#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Serves through other projects' stacks, and compares every answer with one server's. --help explains.
exec bash "$(dirname "${BASH_SOURCE[0]}")/../run.sh" stacks "$@"
