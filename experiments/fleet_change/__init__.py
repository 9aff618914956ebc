# SPDX-License-Identifier: Apache-2.0
"""What does it cost clients to restart, update or lose the servers?"""
