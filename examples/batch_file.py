"""Complete a file of prompts, one JSON object per line. Several prompts share each forward pass.

    python examples/batch_file.py prompts.jsonl texts.jsonl [MODEL]

The command line does the same and can resume: lookahead generate MODEL --input prompts.jsonl --output texts.jsonl
"""

import json
import sys
from pathlib import Path

import lookahead

if len(sys.argv) < 3:
    sys.exit("usage: python examples/batch_file.py prompts.jsonl texts.jsonl [MODEL]")
source, destination = Path(sys.argv[1]), Path(sys.argv[2])
llm = lookahead.load(sys.argv[3] if len(sys.argv) > 3 else None)
prompts = [json.loads(line)["prompt"] for line in source.read_text(encoding="utf-8").splitlines()]

with destination.open("w", encoding="utf-8") as file:
    # `run` yields an update for every step of every prompt. The last update of a prompt contains its result or error.
    for update in llm.run(prompts, batch_size=4, max_new_tokens=64):
        if update.result is not None:
            record = {
                "index": update.index,
                "text": update.result.text,
                "finish": update.result.finish_reason,
            }
            file.write(json.dumps(record, ensure_ascii=False) + "\n")
print(f"{len(prompts)} completions in {destination}")
