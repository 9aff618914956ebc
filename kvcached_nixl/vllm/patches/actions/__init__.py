# SPDX-License-Identifier: Apache-2.0
"""What changes vLLM at run time. The modules beside this folder only read."""
