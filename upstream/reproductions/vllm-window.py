# SPDX-License-Identifier: Apache-2.0
"""kvcached has an adapter for the model runner of vLLM 0.31, 0.32 and 0.33."""

import sys

from kvcached.integration.version_utils import VersionRange
from kvcached.integration.vllm.patches import VLLM_MRV2_RANGE

refused = [one for one in ("0.30.0", "0.31.0", "0.32.0", "0.33.0") if not VersionRange(VLLM_MRV2_RANGE).contains(one)]
print(f"no adapter for vLLM {', '.join(refused)}" if refused else "an adapter for vLLM 0.30 to 0.33")
sys.exit(bool(refused))
