"""Is sampling with lookahead the same as without? Three questions, from the strongest to the weakest.

same seed, same tokens    of every text, lookahead against plain decoding: equality, no statistics
the joint distribution    of the first tokens, lookahead's draws against plain sampling and against the
                          exact distribution that is enumerated from the model (chi-square)
ROUGE                     of texts against references, as in the paper's table 2
"""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from lookahead.bench.method import RunOptions
from lookahead.bench.methods import Drafted, make_methods
from lookahead.bench.model import ModelUnderTest
from lookahead.bench.pictures import COLOURS, label, new_figure
from lookahead.bench.record import Record
from lookahead.bench.summary import figures, number, plain_of
from lookahead.bench.workloads import Prompt, find_file, load_workload
from lookahead.core import SettingsError

from .study import Study

Cell = tuple[int, ...]
Distribution = dict[Cell, float]
#: Texts drawn for the test of the joint distribution.
DRAWS = 1000
#: Tokens of a prompt that these texts go on from: each draw reads them again.
BEGINNING = 32


def rouge(records: Sequence[Record]) -> dict[str, float]:
    """Mean ROUGE-1, -2 and -L (F measure) of texts that have a reference. Empty where none has one."""
    try:
        from rouge_score.rouge_scorer import RougeScorer  # type: ignore[import-untyped]
    except ImportError:
        raise SettingsError('ROUGE needs rouge-score: pip install "lookahead-decoding[bench]"') from None
    kinds = ["rouge1", "rouge2", "rougeL"]
    scorer = RougeScorer(kinds, use_stemmer=True)
    scores = [scorer.score(r["reference"], r["text"]) for r in records if r.get("reference")]
    if not scores:
        return {}
    return {kind: sum(score[kind].fmeasure for score in scores) / len(scores) for kind in kinds}


def exact_distribution(
    model: ModelUnderTest,
    prompt: Sequence[int],
    depth: int,
    options: RunOptions,
    temperature: float | None = None,
) -> Distribution:
    """The joint distribution of the first ``depth`` tokens, enumerated; a text that ends earlier is a cell too.

    Args:
        options: ``top_k`` must be set, or the tree of texts is too large.
        temperature: in place of that of the options.
    """
    import torch

    if not 0 < options.top_k <= 16:
        raise SettingsError(f"top_k must be between 1 and 16 to enumerate all texts, got {options.top_k}")
    heat = options.temperature if temperature is None else temperature
    distribution: Distribution = {(): 1.0}
    for _ in range(depth):
        grown: Distribution = {}
        for cell, chance in distribution.items():
            if cell and cell[-1] in model.eos:
                grown[cell] = chance
                continue
            ids = torch.tensor([[*prompt, *cell]], device=model.model.device)
            with torch.no_grad():
                row = model.model(input_ids=ids, use_cache=False).logits[0, -1].double()
            values, tokens = (row / heat).topk(options.top_k)
            for p, token in zip(values.softmax(-1).tolist(), tokens.tolist(), strict=True):
                grown[(*cell, token)] = chance * p
        distribution = grown
    return distribution


def entropy(distribution: Distribution) -> float:
    """In bits."""
    return -sum(p * math.log2(p) for p in distribution.values() if p > 0)


def chi_square(counts: Counter[Cell], distribution: Distribution) -> tuple[float, int]:
    """(p value, cells) of counts against a distribution; cells with fewer than 5 expected are joined into one."""
    from scipy.stats import chisquare  # type: ignore[import-untyped]

    total = sum(counts.values())
    large = [cell for cell in distribution if distribution[cell] * total >= 5]
    observed = [float(counts[cell]) for cell in large]
    expected = [distribution[cell] * total for cell in large]
    others = total - sum(expected)
    if others > 1e-9 * total or total != sum(observed):
        observed.append(total - sum(observed))
        expected.append(max(others, 1e-9))
    return float(chisquare(observed, expected, sum_check=False).pvalue), len(expected)


def chi_square_two(a: Counter[Cell], b: Counter[Cell]) -> tuple[float, int]:
    """(p value, cells) that two sets of draws have one distribution; cells with fewer than 10 draws are joined."""
    from scipy.stats import chi2_contingency

    cells = [cell for cell in set(a) | set(b) if a[cell] + b[cell] >= 10]
    rows = [[side[cell] for cell in cells] for side in (a, b)]
    others = [sum(side.values()) - sum(row) for side, row in zip((a, b), rows, strict=True)]
    if sum(others):
        rows = [[*row, left] for row, left in zip(rows, others, strict=True)]
    if len(rows[0]) < 2:
        return 1.0, len(rows[0])
    return float(chi2_contingency(rows).pvalue), len(rows[0])


@dataclass(frozen=True, slots=True)
class JointDistribution:
    """The chi-square tests of one prompt.

    Attributes:
        draws, depth, cells: texts drawn, tokens of each that count, cells of the exact distribution.
        compression_ratio: S of lookahead's draws; above 1, or nothing was tested.
        p_exact: lookahead against the exact distribution. p_plain: lookahead against transformers' plain sampling.
        p_wrong: lookahead against the exact distribution at another temperature; near 0, or the test sees nothing.
    """

    draws: int
    depth: int
    cells: int
    compression_ratio: float
    p_exact: float
    p_plain: float
    p_wrong: float


def joint_distribution(
    model: ModelUnderTest,
    prompts: Sequence[Sequence[int]],
    method: str = "lookahead:5,3,5",
    draws: int = DRAWS,
    depth: int = 3,
    top_k: int = 4,
    temperature: float = 1.0,
    progress: Callable[[int, int, str], None] | None = None,
) -> JointDistribution:
    """Test the joint distribution of the first tokens after that prompt whose distribution has the largest entropy.

    The method keeps its n-grams from draw to draw, so that drafts are there to be accepted.
    """
    options = RunOptions(max_new_tokens=depth + 2, temperature=temperature, top_k=top_k)
    distributions = [exact_distribution(model, prompt, depth, options) for prompt in prompts]
    distribution, prompt = max(zip(distributions, prompts, strict=True), key=lambda pair: entropy(pair[0]))
    drafted = make_methods(method, model)[-1]
    assert isinstance(drafted, Drafted)
    counts: Counter[Cell] = Counter()
    steps = tokens = 0
    show = progress or (lambda done, total, what: None)
    for seed in range(draws):
        show(seed, draws, "draws for the joint distribution")
        outcome = drafted.decode(model, prompt, replace(options, seed=seed))
        counts[tuple(outcome.tokens[:depth])] += 1
        steps += len(outcome.step_tokens)
        tokens += sum(outcome.step_tokens)
    plain = _plain_draws(model, prompt, depth, options, draws)
    wrong = exact_distribution(model, prompt, depth, options, temperature * 1.2)
    p_exact, cells = chi_square(counts, distribution)
    return JointDistribution(
        draws,
        depth,
        cells,
        tokens / steps if steps else 1.0,
        p_exact,
        chi_square_two(counts, plain)[0],
        chi_square(counts, wrong)[0],
    )


def _plain_draws(
    model: ModelUnderTest, prompt: Sequence[int], depth: int, options: RunOptions, draws: int
) -> Counter[Cell]:
    """Texts of transformers' own sampling, many at a time."""
    import torch
    from transformers import GenerationConfig

    eos = sorted(model.eos) or None
    config = GenerationConfig(  # type: ignore[no-untyped-call]
        max_new_tokens=depth, do_sample=True, temperature=float(options.temperature), top_k=options.top_k, top_p=1.0,
        eos_token_id=eos, pad_token_id=eos[0] if eos else 0,
    )  # fmt: skip
    ids = torch.tensor([list(prompt)], device=model.model.device)
    torch.manual_seed(options.seed + 1)
    counts: Counter[Cell] = Counter()
    while sum(counts.values()) < draws:
        config.num_return_sequences = min(200, draws - sum(counts.values()))
        texts = model.model.generate(ids, attention_mask=torch.ones_like(ids), generation_config=config)
        for text in texts[:, len(prompt) :].tolist():
            end = next((i + 1 for i, token in enumerate(text) if token in model.eos), len(text))
            counts[tuple(text[:end])] += 1
    return counts


def same_tokens(records: Sequence[Record]) -> tuple[int, int]:
    """(texts equal to plain decoding with the same seed, texts compared)."""
    compared = [record for record in records if record.get("equal") is not None]
    return sum(record["equal"] for record in compared), len(compared)


def groups(records: Sequence[Record]) -> list[tuple[tuple[float, str, str], list[Record]]]:
    """Measured records by (temperature, method, state)."""

    def key(record: Record) -> tuple[float, str, str]:
        return record["options"]["temperature"], record["method"], record["state"]

    measured = sorted((r for r in records if "skipped" not in r), key=key)
    return [(name, list(group)) for name, group in itertools.groupby(measured, key)]


def as_rows(records: Sequence[Record]) -> list[dict[str, Any]]:
    """Rows of the page's table: temperature, method, cold or warm, ROUGE, S, speed-up, equality."""
    rows = []
    plain = plain_of(r for r in records if "skipped" not in r)
    for (temperature, method, state), group in groups(records):
        x = figures(group, plain)
        rows.append(
            {"temperature": temperature, "method": method, "state": state, "texts": len(group), **rouge(group),
             "S": x.s_steps, "speed_up": x.total, "equal": x.equal, "compared": x.compared}
        )  # fmt: skip
    return rows


def summaries(study: Study) -> list[Prompt]:
    """Prompts of the data sets of the paper's table 2 that are at hand, else of Spec-Bench's summaries, else code."""
    at_hand = [name for name in ("cnn-dailymail", "xsum") if find_file(name, study.data) is not None]
    if study.workloads or at_hand or find_file("spec-bench", study.data) is None:
        return study.prompts(16, at_hand or ("stdlib",))
    prompts = load_workload("spec-bench", None, study.options.seed, study.data)
    return [p for p in prompts if p.category == "summarization"][
        : 16 if study.limit is None else study.limit or None
    ]


def sampling_quality(study: Study) -> Path:
    """Table 2: temperatures 0, 0.5 and 1, plain against lookahead; and tests that can fail."""
    method = "lookahead:15,5,15"
    prompts = summaries(study)
    records: list[Record] = []
    for temperature in (0.0, 0.5, 1.0):
        options = replace(study.options, temperature=temperature, repeats=1)
        records += study.run(["hf-greedy" if not temperature else "hf-sample", method], prompts, options)
    model = study.model
    texts = [p.tokens(model.tokenizer)[:BEGINNING] for p in prompts[:8]]
    tests = joint_distribution(model, texts, draws=DRAWS, progress=study.progress)
    rows = as_rows(records)
    body = [
        "| temperature | method | n-grams of earlier prompts | texts | ROUGE-1 | ROUGE-2 | ROUGE-L | S | speed-up "
        "| equal to plain decoding, same seed |",
        "| ---: | --- | --- |" + " ---: |" * 7,
    ]
    for row in rows:
        scores = " | ".join(
            number(row.get(kind, float("nan")) * 100) for kind in ("rouge1", "rouge2", "rougeL")
        )
        same = f"{row['equal']}/{row['compared']}" if row["compared"] else "another stream"
        body.append(
            f"| {row['temperature']} | `{row['method']}` | {row['state'] or '–'} | {row['texts']} | {scores} "
            f"| {number(row['S'])} | {number(row['speed_up'])} | {same} |"
        )
    equal, compared = same_tokens([r for r in records if r["method"] == method])
    body += [
        "", f"**Same seed, same tokens**: {equal} of {compared} texts.", "",
        f"**The joint distribution of the first {tests.depth} tokens** behind the first {BEGINNING} of a prompt, "
        f"{tests.draws} draws at temperature 1 among the 4 likeliest, {tests.cells} cells, "
        f"S = {tests.compression_ratio:.2f} in these draws (n-grams kept from draw to draw):", "",
        "| lookahead's draws against | chi-square p value |", "| --- | ---: |",
        f"| the exact distribution, enumerated from the model | {tests.p_exact:.3f} |",
        f"| transformers' plain sampling, as many draws | {tests.p_plain:.3f} |",
        f"| the exact one at temperature 1.2 (must be near 0, or the test sees nothing) | {tests.p_wrong:.2g} |",
    ]  # fmt: skip
    figure, axes = new_figure(8.0, 4.8)
    kinds = {"rouge1": "ROUGE-1", "rouge2": "ROUGE-2", "rougeL": "ROUGE-L"}
    for index, row in enumerate(rows):
        places = [place + (index - (len(rows) - 1) / 2) * 0.9 / len(rows) for place in range(3)]
        heights = [row.get(kind, 0.0) * 100 for kind in kinds]
        axes.bar(
            places,
            heights,
            0.85 / len(rows),
            color=COLOURS[index % len(COLOURS)],
            label=f"T = {row['temperature']:g}, {row['method']} {row['state']}".rstrip(),
        )
    axes.set_xticks(range(3), list(kinds.values()))
    axes.grid(False, axis="x")
    label(axes, "Text quality, plain against lookahead", "measure", "F measure (%)")
    differs = [
        study.size(),
        "The paper scores summaries of CNN/Daily Mail and XSum with LLaMA-2 7B. ROUGE is here against the references "
        "of the workload above, where it has any (for stdlib, the function's real body); it must be equal, not high.",
        "The speed-up is over our own plain decoding in the same run. Warm: with the n-grams of the earlier prompts.",
        "`hf-sample` draws from transformers' own stream, so its texts differ; its ROUGE may differ by chance.",
        "Equality of tokens is stronger than the paper's comparison of scores: where all texts are equal, so is "
        "every score.",
    ]
    facts = {"texts": rows, "joint_distribution": asdict(tests)}
    return study.page("sampling-quality", "Sampling quality (table 2)", body, differs, figure, records, facts)
