#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Measures what the router adds to a request, for several numbers of streams. --help explains.
exec bash "$(dirname "${BASH_SOURCE[0]}")/../run.sh" router_overhead "$@"
