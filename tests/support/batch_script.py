# SPDX-License-Identifier: Apache-2.0
"""Run by test_endpoints.py: an `LLM`. argv: prompts as JSON, the output file, and the arguments of the engine."""

from __future__ import annotations

import json
import sys
from pathlib import Path

from vllm import LLM, SamplingParams
from vllm.engine.arg_utils import EngineArgs
from vllm.utils.argparse_utils import FlexibleArgumentParser

if __name__ == "__main__":
    prompts, out, *arguments = sys.argv[1:]
    parser = EngineArgs.add_cli_args(FlexibleArgumentParser())
    # Some are of a server.
    llm = LLM.from_engine_args(EngineArgs.from_cli_args(parser.parse_known_args(arguments)[0]))
    given = [{"prompt_token_ids": one} for one in json.loads(prompts)]
    done = llm.generate(given, SamplingParams(temperature=0.0, max_tokens=12, n=1), use_tqdm=False)
    Path(out).write_text(json.dumps([list(one.outputs[0].token_ids) for one in done]))
    llm.llm_engine.engine_core.shutdown()
