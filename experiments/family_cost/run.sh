#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Measures hand-overs of models with several KV-cache groups, beside a model with one. --help explains.
exec bash "$(dirname "${BASH_SOURCE[0]}")/../run.sh" family_cost "$@"
