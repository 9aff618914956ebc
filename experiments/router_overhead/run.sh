#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# What the router adds to a request, by how many streams there are. --help explains.
exec bash "$(dirname "${BASH_SOURCE[0]}")/../run.sh" router_overhead "$@"
