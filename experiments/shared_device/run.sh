#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Two models on one device, each as prefill and decode, with every way of sharing its memory. --help explains.
exec bash "$(dirname "${BASH_SOURCE[0]}")/../run.sh" shared_device "$@"
