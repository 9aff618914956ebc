# SPDX-License-Identifier: Apache-2.0
"""What does the first hand-over of a pair cost, and does the cost grow with the memory that kvcached reserves?"""
