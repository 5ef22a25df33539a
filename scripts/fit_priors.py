"""Fit src/lookahead/drafters/adaptive/priors.json, the adaptive drafter's initial estimates.

    python scripts/fit_priors.py MODEL --data DIR
    python scripts/fit_priors.py MODEL MODEL --data DIR --counted     only those of tables counted in the corpus

MODEL decodes prompts from DIR: GSM8K's training questions, the first halves of MBPP's solutions from row 500 on, and
every second row of four categories of Spec-Bench. Each prompt is decoded once greedily and once at temperature 1. All
of them share one state, in which every bucket of proposals counts its trials and hits. To these counts, a bucket's
log-odds are fitted as a sum of one number per feature (ridge logistic regression by Newton's method). The file
contains only these numbers, no text.
"""

from __future__ import annotations

import argparse
import json
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

import lookahead
from lookahead import Adaptive, AdaptiveState
from lookahead.drafters.adaptive.base_files import base_table_of, key_of
from lookahead.drafters.adaptive.calibration import ANSWERED, HEIGHTS, KINDS, ORDERS, ORIGINS, STATES, ZONES
from lookahead.drafters.adaptive.sources.base_table import BASE_AXES
from lookahead.drafters.adaptive.sources.head_file import HeadWeights
from lookahead.drafters.adaptive.sources.light_head import GUESS_LEVELS
from lookahead.drafters.adaptive.sources.suffix import MATCH_ORDERS, SHARES

OUT = Path(__file__).parents[1] / "src/lookahead/drafters/adaptive/priors.json"
#: Categories of Spec-Bench; the others contain prompts of measured data sets.
CATEGORIES = ("translation", "summarization", "qa", "rag")
#: (sizes of the axes of the buckets, groups of axes that form a feature) of each kind of proposal.
SUFFIX = (MATCH_ORDERS, len(SHARES) + 1, 3, 2), [(0,), (1,), (2,), (3,)]
PAIRS = (STATES, STATES), [(0,), (1,), (0, 1)]
JOINT = (ZONES, ANSWERED, STATES, STATES), [(0,), (1,), (2,), (3,), (2, 3)]
BOTH = (GUESS_LEVELS, STATES, STATES), [(0,), (1,), (2,), (1, 2)]


def prompts(data: Path, count: int) -> list[str]:
    """``count`` prompts, a third of each kind. The selection is fixed."""

    def lines(name: str) -> list[Any]:
        return [json.loads(line) for line in (data / name).read_text().splitlines()]

    halves = (row["code"] for row in lines("mbpp/mbpp.jsonl")[500:])
    kinds = [
        [row["question"] for row in lines("gsm8k/train.jsonl")],
        ["Complete this function:\n" + code[: len(code) // 2] for code in halves],
        [row["turns"][0] for row in lines("spec_bench/question.jsonl")[::2] if row["category"] in CATEGORIES],
    ]
    return [text for kind in kinds for text in random.Random(0).sample(kind, count // 3)]


def fit(
    hits: Any, trials: Any, shape: tuple[int, ...], terms: Sequence[tuple[int, ...]], ridge: float = 0.3
) -> list[Any]:
    """Fit the log-odds of buckets as sums of one number per term. Returns an array for each term.

    Args:
        hits, trials: counts by bucket.
        shape: sizes of the axes of the buckets.
        terms: sets of axes.
        ridge: strength of the regularization.
    """
    # One column for the constant, then one for each combination of indices of each term.
    places = np.indices(shape).reshape(len(shape), -1)
    blocks = []
    for axes in terms:
        sizes = [shape[axis] for axis in axes]
        blocks.append(np.eye(np.prod(sizes, dtype=int))[np.ravel_multi_index(places[list(axes)], sizes)])
    design = np.hstack([np.ones((len(places[0]), 1)), *blocks])
    trials = trials.ravel()
    hits = hits.ravel()

    # Newton's method, with steps of at most 1. The constant is not regularized.
    weights = np.zeros(design.shape[1])
    strength = np.full(len(weights), ridge)
    strength[0] = 1e-6
    for _ in range(50):
        shares = 1 / (1 + np.exp(-design @ weights))
        slope = design.T @ (hits - trials * shares) - strength * weights
        curve = (design.T * (trials * shares * (1 - shares))) @ design + np.diag(strength)
        step = np.linalg.solve(curve, slope)
        weights += step / max(1.0, np.abs(step).max())

    # Split the weights by term; the constant becomes part of the first term.
    ends = np.cumsum([1, *(block.shape[1] for block in blocks)])
    parts = np.split(weights, ends)[:-1]
    parts[1] = parts[1] + parts[0]
    return [part.reshape([shape[axis] for axis in axes]) for part, axes in zip(parts[1:], terms, strict=True)]


def priors_of(state: AdaptiveState, sampled: bool) -> dict[str, Any]:
    """Log-odds fitted to the counts of a state, by kind of proposal."""
    counts = state.tables(sampled).buckets
    heights = len(HEIGHTS) + 1 if sampled else 1
    logits = (ORDERS, heights, ORIGINS, KINDS), [(0,), (1,), (2,), (3,)]
    suffix = fit(counts["suffix"]["hits"], counts["suffix"]["trials"], *SUFFIX)
    zones, answered, rows, columns, pairs = fit(counts["joint"]["hits"], counts["joint"]["trials"], *JOINT)
    pairs = (pairs + rows[:, None] + columns).ravel()
    cached, based, recalled = fit(counts["pairs"]["hits"], counts["pairs"]["trials"], *PAIRS)
    axes = BASE_AXES[sampled]
    of_base = fit(
        counts["base"]["hits"], counts["base"]["trials"], axes, [(axis,) for axis in range(len(axes))]
    )
    fitted = {
        "matches": suffix,
        "logits": fit(counts["logits"]["hits"], counts["logits"]["trials"], *logits),
        "base": of_base,
        "pairs": [(recalled + cached[:, None] + based).ravel()],
        "joint": [zones, answered, pairs],
    }
    return {kind: [np.round(part, 2).tolist() for part in parts] for kind, parts in fitted.items()}


def priors_with_head(state: AdaptiveState, sampled: bool) -> dict[str, Any]:
    """As ``priors_of``, for pairs of the light head and any other source."""
    counts = state.tables(sampled).buckets["both"]
    levels, rows, columns, pairs = fit(counts["hits"], counts["trials"], *BOTH)
    both = levels, (pairs + rows[:, None] + columns).ravel()
    return {"both": [np.round(part, 2).tolist() for part in both]}


def priors_of_counted(state: AdaptiveState, sampled: bool) -> dict[str, Any]:
    """As ``priors_of``, for the base table alone."""
    counts = state.tables(sampled).buckets["base"]
    axes = BASE_AXES[sampled]
    fitted = fit(counts["hits"], counts["trials"], axes, [(axis,) for axis in range(len(axes))])
    return {"counted": [np.round(part, 2).tolist() for part in fitted]}


def decode(llm: Any, state: AdaptiveState, options: argparse.Namespace) -> None:
    """Decode the prompts, greedily and sampled, and count in the state."""
    for number, text in enumerate(prompts(options.data, options.prompts)):
        for temperature in (0.0, 1.0):
            # Forget the tokens of earlier prompts, as in a cold start, but keep the counts.
            for sampled in (False, True):
                cache = state.tables(sampled).logits.arrays
                cache.slots["key"] = 0
                cache.spans["oldest"] = cache.spans["newest"]
            chat = [{"role": "user", "content": text}]
            llm.generate(
                chat,
                max_new_tokens=options.new_tokens,
                drafter=Adaptive(rows=12, state=state, head=options.head),
                temperature=temperature,
                seed=number,
            )
        print(f"{number + 1} of {options.prompts} prompts", end="\r", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("models", nargs="*", default=[None], help="default: the library's default model")
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--head", help="a light head or auto; fit only its pairs with other sources")
    parser.add_argument("--counted", action="store_true", help="fit only the base table, which is counted")
    parser.add_argument("--threads", type=int)
    parser.add_argument("--prompts", type=int, default=60)
    parser.add_argument("--new-tokens", type=int, default=128)
    options = parser.parse_args()

    # Decode the prompts with one shared state.
    HeadWeights.parameter_count = 0  # use the head everywhere, not only where it pays off
    state = AdaptiveState()
    for model in options.models:
        llm = lookahead.load(model, dtype=options.dtype, threads=options.threads)
        table = base_table_of(llm.tokenizer, key_of(llm.model), llm.vocabulary)
        if options.counted and (table is None or table.learned):
            raise SystemExit(f"{llm.name} has no table that was counted in the corpus; generate a text first")
        for sampled in (False, True):
            # Start with the same buckets as without a state, or without trials.
            state.tables(sampled, None if options.counted else table)
        decode(llm, state, options)

    # Fit the priors to its counts.
    fits = json.loads(OUT.read_text())
    fitted = priors_with_head if options.head else priors_of_counted if options.counted else priors_of
    for sampled, name in enumerate(fits):
        fits[name] |= fitted(state, bool(sampled))
    OUT.write_text(json.dumps(fits, separators=(",", ":")).replace("]],", "]],\n") + "\n")
    for sampled, name in enumerate(fits):
        joint = state.tables(bool(sampled)).buckets["joint"]
        print(f"{name}: {joint['trials'].sum():.0f} proposals, {joint['hits'].sum():.0f} right")


if __name__ == "__main__":
    main()
