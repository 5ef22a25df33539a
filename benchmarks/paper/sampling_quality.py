"""Table 2 of the paper: does lookahead change what is sampled? Three tests, the strongest first:

same seed, same tokens    every completion with lookahead equals that of plain decoding; no statistics needed
joint distribution        lookahead's samples of the first tokens, compared by chi-square with plain sampling and with
                          the exact distribution, enumerated from the model
ROUGE                     scores of completions against references, as in the paper
"""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from lookahead.bench.methods import PLAIN, Drafted, ModelUnderTest, RunOptions, load_model, make_methods
from lookahead.bench.record import Record, was_busy
from lookahead.bench.report import figures, number, plain_of
from lookahead.bench.workloads import Prompt
from lookahead.core import SettingsError
from lookahead.hf.model import HFModel

from ..datasets import find_file, load_workload
from .committed import Head
from .intervals import drawn_sums, interval
from .study import Page, Study, model_and_machine

Cell = tuple[int, ...]
Distribution = dict[Cell, float]
METHOD = "lookahead:15,5,15"
#: Those of the paper's table.
TEMPERATURES = (0.0, 1.0)
#: Table 2: data set -> temperature -> (S, speed-up).
PAPER = {
    "CNN/Daily Mail": {0.0: (1.72, 1.57), 1.0: (1.64, 1.46)},
    "XSum": {0.0: (1.77, 1.60), 1.0: (1.67, 1.50)},
}
#: Table 2, CNN/Daily Mail: temperature -> ROUGE-1, -2 and -L of autoregressive decoding, then of lookahead.
PAPER_ROUGE: dict[float, tuple[tuple[float, ...], tuple[float, ...]]] = {
    0.0: ((37.79, 14.59, 23.96), (37.79, 14.59, 23.96)),
    1.0: ((36.55, 13.20, 22.68), (36.53, 13.27, 22.71)),
}
#: Number of completions sampled for the test of the joint distribution.
DRAWS = 1000
#: Temperature of a distribution that the test must reject, to show its power. With 1.2, p was 0.006 and 0.12 for 1000
#: draws.
WRONG_TEMPERATURE = 1.5
#: Number of prompt tokens in this test; they are few because every sample repeats the prefill.
BEGINNING = 32
KINDS = {"rouge1": "ROUGE-1", "rouge2": "ROUGE-2", "rougeL": "ROUGE-L"}


def rouge(text: str, reference: str) -> dict[str, float]:
    """ROUGE-1, -2 and -L (F measure) of a completion.

    Raises:
        SettingsError: rouge-score is not installed.
    """
    try:
        from rouge_score.rouge_scorer import RougeScorer  # type: ignore[import-untyped]
    except ImportError:
        raise SettingsError(
            "ROUGE needs rouge-score, which is not installed: pip install rouge-score"
        ) from None
    scores = RougeScorer(list(KINDS), use_stemmer=True).score(reference, text)
    return {kind: round(scores[kind].fmeasure, 6) for kind in KINDS}


def mean_rouge(records: Sequence[Record]) -> dict[str, float]:
    """Mean scores over the records with a reference. Empty if there are none."""
    scores = [record["rouge"] for record in records if record.get("rouge")]
    return {kind: sum(score[kind] for score in scores) / len(scores) for kind in KINDS} if scores else {}


def exact_distribution(
    model: ModelUnderTest,
    prompt: Sequence[int],
    depth: int,
    options: RunOptions,
    temperature: float | None = None,
) -> Distribution:
    """The joint distribution of the first ``depth`` tokens, enumerated. A completion that ends earlier is a cell too.

    Args:
        model: a transformers model.
        prompt: token ids.
        depth: number of tokens.
        options: ``top_k`` must be set; without it, there are too many cells.
        temperature: overrides the temperature of the options.

    Raises:
        SettingsError: ``top_k`` is not between 1 and 16.
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
                row = model.model.module(input_ids=ids, use_cache=False).logits[0, -1].double()
            values, tokens = (row / heat).topk(options.top_k)
            for p, token in zip(values.softmax(-1).tolist(), tokens.tolist(), strict=True):
                grown[(*cell, token)] = chance * p
        distribution = grown
    return distribution


def entropy(distribution: Distribution) -> float:
    """Entropy in bits."""
    return -sum(p * math.log2(p) for p in distribution.values() if p > 0)


def chi_square(counts: Counter[Cell], distribution: Distribution) -> tuple[float, int]:
    """(p value, cells) of the test that counts follow a distribution. Cells with expected counts < 5 are merged."""
    from scipy.stats import chisquare  # type: ignore[import-untyped]

    total = sum(counts.values())
    large = [cell for cell in distribution if distribution[cell] * total >= 5]
    observed = [float(counts[cell]) for cell in large]
    expected = [distribution[cell] * total for cell in large]
    others = total - sum(expected)
    if others > 1e-9 * total or total != sum(observed):
        observed.append(total - sum(observed))
        expected.append(max(others, 1e-9))
    if len(expected) < 2:
        return 1.0, len(expected)
    return float(chisquare(observed, expected, sum_check=False).pvalue), len(expected)


def chi_square_two(a: Counter[Cell], b: Counter[Cell]) -> tuple[float, int]:
    """(p value, cells) of the test that two samples have the same distribution. Cells with fewer than 10 samples are
    merged."""
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
        draws: number of samples.
        depth: number of compared tokens per sample.
        cells: number of cells of the exact distribution.
        compression_ratio: S of lookahead's samples; 1 means that no draft was accepted and nothing was tested.
        p_exact: p value against the exact distribution.
        p_plain: p value against transformers' plain sampling.
        p_wrong: p value against the exact distribution at ``wrong_temperature``; near 0 if the test has power.
        wrong_temperature: the wrong temperature.
    """

    draws: int
    depth: int
    cells: int
    compression_ratio: float
    p_exact: float
    p_plain: float
    p_wrong: float
    wrong_temperature: float = WRONG_TEMPERATURE


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
    """Test the joint distribution of the first tokens, on the prompt with the largest entropy.

    The method keeps its n-grams from sample to sample, so that there are drafts to accept.
    """
    # Choose the prompt.
    options = RunOptions(max_new_tokens=depth + 2, temperature=temperature, top_k=top_k)
    distributions = [exact_distribution(model, prompt, depth, options) for prompt in prompts]
    distribution, prompt = max(zip(distributions, prompts, strict=True), key=lambda pair: entropy(pair[0]))

    # Sample with lookahead.
    drafted = make_methods(method, model)[-1]
    assert isinstance(drafted, Drafted)
    counts: Counter[Cell] = Counter()
    steps = tokens = 0
    show = progress or (lambda done, total, what: None)
    for seed in range(draws):
        show(seed, draws, "samples for the joint distribution")
        outcome = drafted.decode(model, prompt, replace(options, seed=seed))
        counts[tuple(outcome.tokens[:depth])] += 1
        steps += len(outcome.step_tokens)
        tokens += sum(outcome.step_tokens)

    # Compare with plain sampling and with the exact distributions.
    plain = _plain_draws(model, prompt, depth, options, draws)
    wrong = exact_distribution(model, prompt, depth, options, WRONG_TEMPERATURE)
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
    """First tokens of transformers' own sampling, in batches."""
    import torch
    from transformers import GenerationConfig

    eos = sorted(model.eos) or None
    config = GenerationConfig(  # type: ignore[no-untyped-call]
        max_new_tokens=depth,
        do_sample=True,
        temperature=float(options.temperature),
        top_k=options.top_k,
        top_p=1.0,
        eos_token_id=eos,
        pad_token_id=eos[0] if eos else 0,
    )
    ids = torch.tensor([list(prompt)], device=model.model.device)
    torch.manual_seed(options.seed + 1)
    counts: Counter[Cell] = Counter()
    while sum(counts.values()) < draws:
        config.num_return_sequences = min(200, draws - sum(counts.values()))
        texts = model.model.module.generate(
            ids, attention_mask=torch.ones_like(ids), generation_config=config
        )
        for text in texts[:, len(prompt) :].tolist():
            end = next((i + 1 for i, token in enumerate(text) if token in model.eos), len(text))
            counts[tuple(text[:end])] += 1
    return counts


def summaries(study: Study) -> list[Prompt]:
    """The prompts.

    These come from the paper's data sets if they are in the data folder; otherwise they are Spec-Bench's summaries of
    CNN/Daily Mail, or else functions of the standard library.
    """
    sets = ("cnn-dailymail", "xsum")
    present = any(find_file(name, study.data) is not None for name in sets)
    if study.workloads or present or find_file("spec-bench", study.data) is None:
        return study.prompts(20, sets)
    prompts = load_workload("spec-bench", None, study.options.seed, study.data)
    count = 20 if study.limit is None else study.limit or None
    return [p for p in prompts if p.category == "summarization"][:count]


def measure(study: Study) -> tuple[list[Record], dict[str, Any]]:
    """Measure plain decoding and lookahead at the paper's temperatures, then test the joint distribution.

    The exact distribution is enumerated with a transformers model. If the model under test is not one (packed
    weights), the test uses the same model in float32.
    """
    prompts = summaries(study)
    records: list[Record] = []
    for temperature in TEMPERATURES:
        options = replace(study.options, temperature=temperature, repeats=1, warm=False)
        records += study.run([METHOD], prompts, options)
    tested = study.model
    if not isinstance(tested.model, HFModel):
        tested = load_model(study.model_path, dtype="float32")
    return with_rouge(records), {"joint_distribution": measure_joint(tested, prompts, study.progress)}


def with_rouge(records: Sequence[Record]) -> list[Record]:
    """The records; those with a reference also have ROUGE scores."""
    return [
        record | ({"rouge": rouge(record["text"], record["reference"])} if record.get("reference") else {})
        for record in records
    ]


def measure_joint(
    model: ModelUnderTest, prompts: Sequence[Prompt], progress: Callable[[int, int, str], None] | None = None
) -> dict[str, Any]:
    """Test the joint distribution after the first tokens of some prompts, for the head of the records."""
    texts = [prompt.tokens(model.tokenizer)[:BEGINNING] for prompt in prompts[:8]]
    tests = joint_distribution(model, texts, draws=DRAWS, progress=progress)
    return asdict(tests) | {"dtype": model.dtype, "path": model.target.path}


def as_rows(records: Sequence[Record]) -> list[dict[str, Any]]:
    """Rows of the page's table: temperature, method, ROUGE, S, speed-up, equality."""
    measured = [record for record in records if "skipped" not in record]
    plain = plain_of(measured)
    rows = []

    def key(record: Record) -> tuple[float, bool, str]:
        return record["options"]["temperature"], record["method"] != PLAIN, record["method"]

    for (temperature, _, method), group in itertools.groupby(sorted(measured, key=key), key):
        texts = list(group)
        x = figures(texts, plain)
        rows.append(
            {
                "temperature": temperature,
                "method": method,
                "texts": len(texts),
                **mean_rouge(texts),
                "intervals": _rouge_intervals(texts),
                "S": x.s_steps,
                "speed_up": x.total,
                "equal": x.equal,
                "compared": x.compared,
            }
        )
    return rows


def _rouge_intervals(records: Sequence[Record]) -> dict[str, tuple[float, float]]:
    """95 % intervals of the mean scores of one method. Empty without references."""
    scored = [record for record in records if record.get("rouge")]
    return {
        kind: interval(drawn_sums(scored, [scored[0]["method"]], lambda r, kind=kind: (r["rouge"][kind], 1)))
        for kind in (KINDS if scored else ())
    }


def _score(row: dict[str, Any], kind: str) -> str:
    ends = [100 * end for end in row["intervals"].get(kind, ())]
    return number(row.get(kind, math.nan) * 100) + (f" [{ends[0]:.1f}–{ends[1]:.1f}]" if ends else "")


def page(head: Head, records: Sequence[Record]) -> Page:
    """Compute the page from the records."""
    # The table. A busy machine's speed-ups are left out.
    rows = as_rows(records)
    timed = head.get("timed", True) and not was_busy(records)
    rows = [row if timed else row | {"speed_up": math.nan} for row in rows]
    body = [
        "| temperature | method | texts | ROUGE-1 | ROUGE-2 | ROUGE-L | the paper's ROUGE-1, -2, -L (CNN/Daily Mail) "
        "| S | the paper's S (CNN/Daily Mail, XSum) | speed-up | the paper's | equal to plain decoding, same seed |",
        "| ---: | --- | ---: | ---: | ---: | ---: | --- | ---: | --- | ---: | --- | ---: |",
    ]
    for row in rows:
        temperature = row["temperature"]
        is_plain = row["method"] == PLAIN
        scores = " | ".join(_score(row, kind) for kind in KINDS)
        paper_rouge = PAPER_ROUGE.get(temperature, ((), ()))[not is_plain]
        known = [] if is_plain else [PAPER[name][temperature] for name in PAPER if temperature in PAPER[name]]
        paper_s, paper_speed = (", ".join(f"{values[i]:.2f}" for values in known) or "–" for i in (0, 1))
        body.append(
            f"| {temperature} | `{row['method']}` | {row['texts']} | {scores} "
            f"| {', '.join(f'{x:.2f}' for x in paper_rouge) or '–'} | {number(row['S'])} | {paper_s} "
            f"| {number(row['speed_up'])} | {paper_speed} | {row['equal']}/{row['compared']} |"
        )

    # The stronger tests: equality, and the joint distribution.
    drafted = [r for r in rows if r["method"] != PLAIN]
    equal, compared = (sum(row[name] for row in drafted) for name in ("equal", "compared"))
    body += ["", "In brackets 95 % intervals over draws of prompts.", ""]
    body += [f"**Same seed, same tokens**: {equal} of {compared} texts.", ""]
    tests = head.get("joint_distribution")
    if tests:
        body += _joint_lines(tests)

    # What differs from the paper, and the figure.
    differs = [
        model_and_machine(head, records),
        *differences(rows),
        "The paper scores summaries of CNN/Daily Mail and XSum with LLaMA-2 7B and the prompts of its appendix D. "
        + _prompts(records)
        + " A low ROUGE says that the model is small; what counts is that it is the same with and without lookahead.",
        "The speed-up is over our own plain decoding in the same run."
        if timed
        else "No speeds: the process was interrupted, or other work ran.",
        "Equality of tokens is stronger than the paper's comparison of scores: if all texts are equal, so is every "
        "score.",
    ]
    facts = {"texts": rows, "joint_distribution": tests}
    return Page("Sampling quality (table 2)", body, differs, facts)


def _prompts(records: Sequence[Record]) -> str:
    workloads = {record["workload"] for record in records}
    if workloads == {"spec-bench"}:
        return 'Here they are Spec-Bench\'s summaries of CNN/Daily Mail articles, with its prompt "Summarize: ...".'
    return f"Here they are those of {' and '.join(sorted(workloads))} (see benchmarks/datasets.py)."


def _joint_lines(tests: dict[str, Any]) -> list[str]:
    return [
        f"**The joint distribution of the first {tests['depth']} tokens** after the first {BEGINNING} tokens of a "
        f"prompt, {tests['draws']} texts sampled at temperature 1 among the 4 most likely tokens in "
        f"{tests['dtype']}, {tests['cells']} cells, S = {tests['compression_ratio']:.2f} in these texts (n-grams "
        "kept from text to text):",
        "",
        "| lookahead's samples against | chi-square p value |",
        "| --- | ---: |",
        f"| the exact distribution, enumerated from the model | {tests['p_exact']:.3f} |",
        f"| transformers' plain sampling, as many texts | {tests['p_plain']:.3f} |",
        f"| the exact distribution at temperature {tests['wrong_temperature']:g} (near 0 if the test has power) | "
        f"{tests['p_wrong']:.2g} |",
    ]


def differences(rows: Sequence[dict[str, Any]]) -> list[str]:
    """A sentence on how S changes with the temperature, here and in the paper."""
    ours = {row["temperature"]: row["S"] for row in rows if row["method"] != PLAIN}
    if not {0.0, 1.0} <= ours.keys():
        return []
    change = 100 * (ours[1.0] / ours[0.0] - 1)
    paper = PAPER["CNN/Daily Mail"]
    theirs = 100 * (paper[1.0][0] / paper[0.0][0] - 1)
    word = "falls" if change < 0 else "rises"
    return [
        f"From temperature 0 to 1, S {word} by {abs(change):.0f} % (from {ours[0.0]:.2f} to {ours[1.0]:.2f}); in the "
        f"paper it falls by {abs(theirs):.0f} % (from {paper[0.0][0]:.2f} to {paper[1.0][0]:.2f} on CNN/Daily Mail)."
    ]
