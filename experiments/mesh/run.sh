#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# 64 prefill and 64 decode engines in one process, 100,000 hand-overs, engines that come and go. --help explains.
exec bash "$(dirname "${BASH_SOURCE[0]}")/../run.sh" mesh "$@"
