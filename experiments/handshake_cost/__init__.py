# SPDX-License-Identifier: Apache-2.0
"""What does the first hand-over of a pair cost, and what does it cost more when kvcached reserves more?"""
