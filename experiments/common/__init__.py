# SPDX-License-Identifier: Apache-2.0
"""What the experiments share: models, servers, clients, digests of KV blocks, reports."""
