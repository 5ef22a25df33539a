"""Is sampling with lookahead the same as without? Three questions, from the strongest to the weakest.

same seed, same tokens    of every text, lookahead against plain decoding: equality, no statistics
the joint law             of the first tokens, lookahead's draws against plain sampling and against the
                          exact law that is enumerated from the model (chi-square)
ROUGE                     of texts against references, as in the paper's table 2
"""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from ..core import SettingsError
from .methods import Drafted, Options, make_methods
from .subject import Subject
from .summary import Record

Cell = tuple[int, ...]
Law = dict[Cell, float]


def rouge(records: Sequence[Record]) -> dict[str, float]:
    """Mean ROUGE-1, -2 and -L (F measure) of texts that have a reference. Empty where none has one."""
    try:
        from rouge_score.rouge_scorer import RougeScorer
    except ImportError:
        raise SettingsError('ROUGE needs rouge-score: pip install "lookahead-decoding[bench]"') from None
    kinds = ["rouge1", "rouge2", "rougeL"]
    scorer = RougeScorer(kinds, use_stemmer=True)
    scores = [scorer.score(r["reference"], r["text"]) for r in records if r.get("reference")]
    if not scores:
        return {}
    return {kind: sum(score[kind].fmeasure for score in scores) / len(scores) for kind in kinds}


def exact_law(
    subject: Subject, prompt: Sequence[int], depth: int, options: Options, temperature: float | None = None
) -> Law:
    """The joint law of the first ``depth`` tokens by enumeration; a text that ends earlier is a cell of its own.

    Args:
        options: ``top_k`` must be set, or the tree of texts is too large.
        temperature: in place of that of the options.
    """
    import torch

    if not 0 < options.top_k <= 16:
        raise SettingsError(f"top_k must be between 1 and 16 to enumerate all texts, got {options.top_k}")
    heat = options.temperature if temperature is None else temperature
    law: Law = {(): 1.0}
    for _ in range(depth):
        grown: Law = {}
        for cell, chance in law.items():
            if cell and cell[-1] in subject.eos:
                grown[cell] = chance
                continue
            ids = torch.tensor([[*prompt, *cell]], device=subject.model.device)
            with torch.no_grad():
                row = subject.model(input_ids=ids, use_cache=False).logits[0, -1].double()
            values, tokens = (row / heat).topk(options.top_k)
            for p, token in zip(values.softmax(-1).tolist(), tokens.tolist(), strict=True):
                grown[(*cell, token)] = chance * p
        law = grown
    return law


def entropy(law: Law) -> float:
    """In bits."""
    return -sum(p * math.log2(p) for p in law.values() if p > 0)


def chi_square(counts: Counter[Cell], law: Law) -> tuple[float, int]:
    """(p value, cells) of counts against a law; cells with fewer than 5 expected are joined into one."""
    from scipy.stats import chisquare

    total = sum(counts.values())
    large = [cell for cell in law if law[cell] * total >= 5]
    observed = [float(counts[cell]) for cell in large]
    expected = [law[cell] * total for cell in large]
    rest = total - sum(expected)
    if rest > 1e-9 * total or total != sum(observed):
        observed.append(total - sum(observed))
        expected.append(max(rest, 1e-9))
    return float(chisquare(observed, expected, sum_check=False).pvalue), len(expected)


def chi_square_two(a: Counter[Cell], b: Counter[Cell]) -> tuple[float, int]:
    """(p value, cells) that two sets of draws have one law; cells with fewer than 10 draws are joined."""
    from scipy.stats import chi2_contingency

    cells = [cell for cell in set(a) | set(b) if a[cell] + b[cell] >= 10]
    rows = [[side[cell] for cell in cells] for side in (a, b)]
    rest = [sum(side.values()) - sum(row) for side, row in zip((a, b), rows, strict=True)]
    if sum(rest):
        rows = [[*row, left] for row, left in zip(rows, rest, strict=True)]
    if len(rows[0]) < 2:
        return 1.0, len(rows[0])
    return float(chi2_contingency(rows).pvalue), len(rows[0])


@dataclass(frozen=True, slots=True)
class JointLaw:
    """The chi-square tests of one prompt.

    Attributes:
        draws, depth, cells: texts drawn, tokens of each that count, cells of the exact law.
        compression_ratio: S of lookahead's draws; above 1, or nothing was tested.
        p_exact: lookahead against the exact law. p_plain: lookahead against transformers' plain sampling.
        p_wrong: lookahead against the exact law at another temperature; near 0, or the test sees nothing.
    """

    draws: int
    depth: int
    cells: int
    compression_ratio: float
    p_exact: float
    p_plain: float
    p_wrong: float


def joint_law(
    subject: Subject,
    prompts: Sequence[Sequence[int]],
    method: str = "lookahead:7,5,7",
    draws: int = 2000,
    depth: int = 3,
    top_k: int = 4,
    temperature: float = 1.0,
    progress: Callable[[int, int, str], None] | None = None,
) -> JointLaw:
    """Test the joint law of the first tokens after that prompt whose law has the largest entropy.

    The method keeps its n-grams from draw to draw, so that drafts are there to be accepted.
    """
    options = Options(max_new_tokens=depth + 2, temperature=temperature, top_k=top_k)
    laws = [exact_law(subject, prompt, depth, options) for prompt in prompts]
    law, prompt = max(zip(laws, prompts, strict=True), key=lambda pair: entropy(pair[0]))
    drafted = make_methods(method, subject)[-1]
    assert isinstance(drafted, Drafted)
    counts: Counter[Cell] = Counter()
    steps = tokens = 0
    tell = progress or (lambda done, total, what: None)
    for seed in range(draws):
        tell(seed, draws, "draws for the joint law")
        outcome = drafted.decode(subject, prompt, replace(options, seed=seed))
        counts[tuple(outcome.tokens[:depth])] += 1
        steps += len(outcome.step_tokens)
        tokens += sum(outcome.step_tokens)
    plain = _plain_draws(subject, prompt, depth, options, draws)
    wrong = exact_law(subject, prompt, depth, options, temperature * 1.2)
    p_exact, cells = chi_square(counts, law)
    return JointLaw(
        draws,
        depth,
        cells,
        tokens / steps if steps else 1.0,
        p_exact,
        chi_square_two(counts, plain)[0],
        chi_square(counts, wrong)[0],
    )


def _plain_draws(
    subject: Subject, prompt: Sequence[int], depth: int, options: Options, draws: int
) -> Counter[Cell]:
    """Texts of transformers' own sampling, many at a time."""
    import torch
    from transformers import GenerationConfig

    eos = sorted(subject.eos) or None
    config = GenerationConfig(
        max_new_tokens=depth, do_sample=True, temperature=float(options.temperature), top_k=options.top_k, top_p=1.0,
        eos_token_id=eos, pad_token_id=eos[0] if eos else 0,
    )  # fmt: skip
    ids = torch.tensor([list(prompt)], device=subject.model.device)
    torch.manual_seed(options.seed + 1)
    counts: Counter[Cell] = Counter()
    while sum(counts.values()) < draws:
        config.num_return_sequences = min(200, draws - sum(counts.values()))
        texts = subject.model.generate(ids, attention_mask=torch.ones_like(ids), generation_config=config)
        for text in texts[:, len(prompt) :].tolist():
            end = next((i + 1 for i, token in enumerate(text) if token in subject.eos), len(text))
            counts[tuple(text[:end])] += 1
    return counts


def same_tokens(records: Sequence[Record]) -> tuple[int, int]:
    """(texts equal to plain decoding with the same seed, texts compared)."""
    compared = [record for record in records if record.get("equal") is not None]
    return sum(record["equal"] for record in compared), len(compared)


def groups(records: Sequence[Record]) -> list[tuple[tuple[float, str], list[Record]]]:
    """Measured records by (temperature, method)."""

    def key(record: Record) -> tuple[float, str]:
        return record["options"]["temperature"], record["method"]

    measured = sorted((r for r in records if "skipped" not in r), key=key)
    return [(name, list(group)) for name, group in itertools.groupby(measured, key)]


def as_rows(records: Sequence[Record]) -> list[dict[str, Any]]:
    """Rows of the page's table: temperature, method, ROUGE, S, equality."""
    rows = []
    for (temperature, method), group in groups(records):
        steps = sum(r["steps"] for r in group)
        tokens = sum(r["new_tokens"] - r["prefill_tokens"] for r in group)
        equal, compared = same_tokens(group)
        rows.append(
            {"temperature": temperature, "method": method, "texts": len(group), **rouge(group),
             "S": tokens / steps if steps else 1.0, "equal": equal, "compared": compared}
        )  # fmt: skip
    return rows
