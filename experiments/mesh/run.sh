#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Runs 100,000 hand-overs among 64 prefill and 64 decode engines in one process. --help explains.
exec bash "$(dirname "${BASH_SOURCE[0]}")/../run.sh" mesh "$@"
