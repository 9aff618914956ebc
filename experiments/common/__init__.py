# SPDX-License-Identifier: Apache-2.0
"""Code that all experiments share: models, servers, clients, digests of KV blocks, reports."""
