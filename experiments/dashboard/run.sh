#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Runs every query of the dashboard and of the alert rules against a Prometheus that scrapes pairs under load. --help
# explains.
exec bash "$(dirname "${BASH_SOURCE[0]}")/../run.sh" dashboard "$@"
