"""One accuracy run through lm-evaluation-harness: GSM8K with plain decoding and with adaptive.

    python -m benchmarks.accuracy [MODEL] --data DIR --limit 100

The completions are equal token for token, so the scores must be equal; the harness confirms this.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from itertools import islice
from pathlib import Path
from typing import Any

import lookahead
from lookahead.bench.record import environment
from lookahead.core import LookaheadError, SettingsError

from .datasets import find_file
from .page import write_report
from .report import markdown_table

METHODS = ("plain", "adaptive")
#: Matches the last number of an answer.
NUMBER = r"(-?[0-9][0-9,]*(?:\.[0-9]+)?)(?!.*[0-9])"


def task(file: Path, limit: int, folder: Path, new_tokens: int) -> dict[str, Any]:
    """The first questions of GSM8K as a local task of the harness."""
    part = folder / "questions.jsonl"
    with file.open() as lines:
        part.write_text("".join(islice(lines, limit)))
    return {
        "task": "gsm8k_local",
        "dataset_path": "json",
        "test_split": "test",
        "output_type": "generate_until",
        "dataset_kwargs": {"data_files": {"test": str(part)}, "cache_dir": str(folder / "cache")},
        "doc_to_text": "{{question}}",
        "doc_to_target": "{{answer.split('####')[-1].strip()}}",
        "generation_kwargs": {"until": [], "max_gen_toks": new_tokens, "do_sample": False},
        "filter_list": [
            {
                "name": "number",
                "filter": [
                    {"function": "regex", "regex_pattern": f"(?s){NUMBER}"},
                    {"function": "take_first"},
                ],
            }
        ],
        "metric_list": [{"metric": "exact_match", "regexes_to_ignore": [",", r"\\.$"]}],
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "model", nargs="?", help="as for lookahead.load (default: the library's default model)"
    )
    parser.add_argument("--data", type=Path, required=True, help="folder of data sets")
    parser.add_argument("--limit", type=int, default=100, help="number of questions")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--max-new-tokens", type=int, default=192)
    parser.add_argument(
        "--out", type=Path, default=Path("build/results/accuracy"), help="figures, without suffix"
    )
    given = parser.parse_args()
    file = find_file("gsm8k", given.data)
    if file is None:
        raise SettingsError(f"--data must contain gsm8k, got {given.data}")
    import lm_eval

    from .lm_eval import HFLookahead

    # Let the harness run the questions with each method.
    llm = lookahead.load(given.model, dtype=given.dtype)
    lines = []
    texts = []
    with tempfile.TemporaryDirectory() as folder:
        local = task(file, given.limit, Path(folder), given.max_new_tokens)
        for method in METHODS:
            model = HFLookahead(
                pretrained=llm.model.module, tokenizer=llm.tokenizer, batch_size=1, drafter=method
            )
            results = lm_eval.simple_evaluate(
                model, tasks=[local], log_samples=True, bootstrap_iters=0, apply_chat_template=True
            )
            texts.append([sample["resps"] for sample in results["samples"]["gsm8k_local"]])
            score = results["results"]["gsm8k_local"]["exact_match,number"]
            new, steps = (
                sum(getattr(stats, name) for stats in model.stats) for name in ("new_tokens", "steps")
            )
            lines.append(
                {
                    "method": method,
                    "questions": len(texts[-1]),
                    "exact_match": score,
                    "S": (new - len(model.stats)) / steps,
                }
            )

    # Write the page.
    record = environment() | {"model": llm.name, "dtype": llm.dtype, "path": llm.path}
    equal = sum(a == b for a, b in zip(*texts, strict=True))
    rows = [[x["method"], str(x["questions"]), f"{x['exact_match']:.3f}", f"{x['S']:.2f}"] for x in lines]
    body = [
        markdown_table(["method", "questions of GSM8K", "exact match of the last number", "S"], rows),
        "",
        f"{equal} of {lines[0]['questions']} texts are equal. Chat template, no examples, greedy, at most "
        f"{given.max_new_tokens} tokens. A small model solves few; what counts is that the scores are equal.",
    ]
    write_report(given.out, "Accuracy through lm-evaluation-harness", record, lines, body, equal=equal)


if __name__ == "__main__":
    try:
        main()
    except LookaheadError as error:
        sys.exit(f"error: {error}")
