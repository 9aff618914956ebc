# SPDX-License-Identifier: Apache-2.0
"""MOVE: geometry, staging and transfers; runs in the worker process, once per device."""
