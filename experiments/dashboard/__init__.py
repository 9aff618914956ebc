# SPDX-License-Identifier: Apache-2.0
"""Does every query of the dashboard and of the alert rules return data from a real Prometheus?"""
