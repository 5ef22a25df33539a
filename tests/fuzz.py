"""Differential fuzzing: random calls to model.generate with and without lookahead, compared token for token.

    python tests/fuzz.py --seconds 3600 --report build/soak.md      the long form (make soak)
    python tests/fuzz.py --case 1234                                       repeat one case by number

A case's number determines everything: model family, weights, prompts, padding, lengths near powers of two and
near the context limit, drafting method and settings, sampling, penalties, end tokens, outputs. Both calls
seed torch's generator identically, so sampled completions and the generator's final state must be equal too.
One case in four calls the engine instead: batched lists of prompts, stop strings, warm state, float32, and
bfloat16 on the compiled path. Each completion is compared with plain decoding of its prompt alone.
"""

from __future__ import annotations

import argparse
import atexit
import functools
import random
import sys
import tempfile
import time
import warnings
from collections import Counter
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import transformers

import learned
import lookahead
import toy
from families import FAMILIES, tiny_model
from lookahead import Adaptive, AdaptiveState, Jacobi, Lookahead, Plain, PromptLookup
from lookahead.drafters.adaptive.sources.head_file import HeadWeights

#: Families decoded one sequence at a time because their rotary base depends on the longest sequence in the
#: batch (in transformers too).
ALONE = ("llama-dynamic-ntk",)
#: These stand for the files of a light head and a base table of the model's vocabulary.
HEAD, TABLE = "head", "table"
DRAFTING: list[dict[str, Any]] = [
    {},
    {},
    {"drafter": Adaptive(rows=16)},
    {"drafter": Adaptive(rows=64)},
    {"drafter": Adaptive(rows=8, head=HEAD)},
    {"drafter": Adaptive(rows=8, table=TABLE)},
    {"drafter": Lookahead(5, 3, 5)},
    {"drafter": Lookahead(15, 5, 15)},
    {"drafter": Lookahead(1, 2, 0)},
    {"drafter": Lookahead(3, 2, 7)},
    {"drafter": Jacobi()},
    {"drafter": PromptLookup()},
    {"drafter": Plain()},
]


#: Families with a sliding window of varying size.
SLIDING = ("mistral-sliding", "gemma2", "gemma3", "olmo3", "cohere2", "gpt-oss")
#: Families on the compiled path, where one row and many are bit-identical even in bfloat16.
COMPILED = ("llama", "qwen2", "qwen3", "mistral", "mistral-sliding")
ENGINE_DRAFTERS = [
    Adaptive(),
    Adaptive(rows=32),
    Adaptive(rows=8, head=HEAD),
    Adaptive(rows=8, table=TABLE),
    Lookahead(5, 3, 5),
    PromptLookup(),
]


#: A head has more weights than these models, so by its cost it would hardly ever be called.
free_head = mock.patch.object(HeadWeights, "parameter_count", 0)


@functools.cache
def learned_folder() -> Path:
    """A folder, for the time of this process."""
    folder = tempfile.TemporaryDirectory()
    atexit.register(folder.cleanup)
    return Path(folder.name)


@functools.cache
def learned_files(vocabulary: int) -> dict[str, str]:
    """A random light head and a base table of random text, by the name that stands for each."""
    files = {name: learned_folder() / f"{name}-{vocabulary}" for name in (HEAD, TABLE)}
    learned.random_head(vocabulary).save(files[HEAD])
    draw = random.Random(vocabulary)
    texts = [[draw.randrange(3, vocabulary) for _ in range(64)] for _ in range(80)]
    learned.save_table(files[TABLE], vocabulary, texts)
    return {name: str(file) for name, file in files.items()}


def with_files(method: dict[str, Any], vocabulary: int) -> dict[str, Any]:
    """Drafting options with the files that they name."""
    drafter = method.get("drafter")
    names = {setting: getattr(drafter, setting, None) for setting in ("head", "table")}
    given = {setting: learned_files(vocabulary)[name] for setting, name in names.items() if name}
    return method | {"drafter": replace(drafter, **given)} if given else method


@functools.lru_cache(maxsize=256)
def model_of(family: str, seed: int, spread: float, window: int = 0) -> Any:
    sliding = {"sliding_window": window} if window else {}
    model = tiny_model(family, seed=seed, initializer_range=spread, **sliding)
    model.generation_config.eos_token_id = None
    return model


@functools.lru_cache(maxsize=256)
def engine_of(family: str, seed: int, dtype: torch.dtype, window: int = 0) -> Any:
    sliding = {"sliding_window": window} if window else {}
    model = tiny_model(family, seed=seed, vocab_size=toy.VOCABULARY, initializer_range=0.1, **sliding)
    return lookahead.LLM(model.to(dtype), toy.tokenizer(), drafter=Adaptive(rows=16))


@dataclass
class Numbered:
    """The fields common to both kinds of case.

    Attributes:
        number: determines the case.
        family: the model family.
        options: completion options.
        method: drafting options.
    """

    number: int
    family: str = ""
    options: dict[str, Any] = field(default_factory=dict)
    method: dict[str, Any] = field(default_factory=dict)


@dataclass
class Case(Numbered):
    """One pair of calls to ``model.generate``."""

    ids: Any = None
    mask: Any = None
    model: Any = None

    @classmethod
    def of(cls, number: int) -> Case:
        # The model.
        draw = random.Random(number)
        case = cls(number, family=draw.choice(FAMILIES))
        seed = draw.randrange(2)
        spread = draw.choice([0.05, 0.1, 0.2])
        window = draw.choice([4, 8, 17, 64])
        case.model = model_of(case.family, seed, spread, window if case.family in SLIDING else 0)

        # Numbers of prompts and tokens.
        rows = 1 if case.family in ALONE else draw.choice([1, 1, 1, 2, 3])
        length = max(
            1, draw.choice([1, 2, 5, 8, 16, 31, 32, 33, 64, 127, 128, 200]) + draw.choice([-1, 0, 0, 1])
        )
        new = draw.choice([1, 2, 3, 7, 16, 33, 48, 64, 100])
        if draw.random() < 0.1:  # up to the model's last position
            new = 256 - length
        new = min(new, 256 - length)
        if case.family in ALONE:  # near the trained length, where the base starts to change
            length = draw.choice([length, 20, 46, 47, 48, 49, 60])
            new = min(new, 256 - length)

        # Repetitive prompts, padded on the left.
        vocabulary = draw.choice([4, 20, 96])
        period = draw.choice([3, 7, length])
        stretch = [[3 + draw.randrange(max(1, vocabulary - 3)) for _ in range(period)] for _ in range(rows)]
        case.ids = torch.tensor([(row * length)[:length] for row in stretch])
        case.mask = torch.ones_like(case.ids)
        for row in range(1, rows):
            padding = draw.randrange(length)
            case.mask[row, :padding] = 0
            case.ids[row, :padding] = 0

        # Options and drafting.
        case.options = {"max_new_tokens": new}
        if draw.random() < 0.5:
            case.options |= {"do_sample": True, "temperature": draw.choice([0.3, 0.7, 1.0, 1.3])}
            case.options |= draw.choice([{}, {"top_k": 5}, {"top_p": 0.8}, {"min_p": 0.05}, {"top_k": 0}])
        if draw.random() < 0.3:
            case.options |= draw.choice(
                [{"repetition_penalty": 1.2}, {"no_repeat_ngram_size": 3}, {"min_new_tokens": min(5, new)}]
            )
        if draw.random() < 0.4:
            case.options |= {
                "eos_token_id": draw.sample(range(3, 96), draw.choice([1, 2, 8])),
                "pad_token_id": 0,
            }
        if draw.random() < 0.2:
            case.options |= {"return_dict_in_generate": True, "output_scores": True}
        case.method = draw.choice(DRAFTING)
        return case

    def run(self, **ours: Any) -> tuple[Any, Any]:
        """(output, final state of the generator)."""
        torch.manual_seed(self.number)
        out = self.model.generate(self.ids, attention_mask=self.mask, **self.options, **ours)
        return out, torch.random.get_rng_state()

    @free_head
    def difference(self) -> tuple[str, int]:
        """("" or what differs, tokens compared)."""
        if self.family in ALONE:
            # transformers keeps the longest sequence's frequencies until a short one resets them.
            self.model(torch.ones(1, 1, dtype=torch.long))
        plain, plain_state = self.run()
        method = with_files(self.method, self.model.config.get_text_config().vocab_size)
        ours, state = self.run(custom_generate=lookahead.generate, **method)
        pair = [out if torch.is_tensor(out) else out.sequences for out in (ours, plain)]
        tokens = (pair[1].shape[1] - self.ids.shape[1]) * len(self.ids)
        if pair[0].tolist() != pair[1].tolist():
            return "tokens", tokens
        if not torch.equal(state, plain_state):
            return "the generator's state", tokens
        if not torch.is_tensor(plain):
            if len(ours.scores) != len(plain.scores):
                return "the number of scores", tokens
            for one, other in zip(ours.scores, plain.scores, strict=True):
                if not torch.allclose(one, other, rtol=1e-3, atol=1e-3):
                    return "scores", tokens
        return "", tokens

    def __str__(self) -> str:
        shape = f"{len(self.ids)} x {self.ids.shape[1]} tokens"
        return f"case {self.number}: {self.family}, {shape}, {self.options}, {self.method}"


@dataclass
class EngineCase(Numbered):
    """One call to ``LLM.generate`` with a list of prompts."""

    prompts: list[Any] = field(default_factory=list)
    llm: Any = None
    warm: bool = False

    @classmethod
    def of(cls, number: int) -> EngineCase:
        draw = random.Random(number)
        dtype = draw.choice([torch.float32, torch.bfloat16])
        family = draw.choice(COMPILED if dtype is torch.bfloat16 else FAMILIES)
        case = cls(number, f"{family} {dtype}")
        window = draw.choice([4, 8, 17, 64])
        case.llm = engine_of(family, draw.randrange(2), dtype, window if family in SLIDING else 0)
        bound = 1 if family in ALONE else draw.choice([1, 2, 5])
        for _ in range(draw.randrange(1, 6)):
            stretch = [3 + draw.randrange(60) for _ in range(draw.choice([1, 3, 9, 40]))]
            ids = (stretch * 40)[: draw.choice([1, 2, 16, 33, 64, 130])]
            if family in ALONE:  # the engine rejects prompts beyond the trained length
                ids = ids[:33]
            case.prompts.append(ids if draw.random() < 0.5 else case.llm.tokenizer.decode(ids) or "x")
        case.options = {"max_new_tokens": draw.choice([1, 2, 15, 33, 64, 100]), "seed": number}
        case.options["ignore_eos"] = draw.random() < 0.7
        if draw.random() < 0.5:
            case.options |= {"temperature": draw.choice([0.3, 0.7, 1.0, 1.3])}
            case.options |= draw.choice([{}, {}, {"top_k": 5}, {"top_p": 0.8}, {"min_p": 0.05}])
        if draw.random() < 0.3:
            case.options |= draw.choice([{"repetition_penalty": 1.2}, {"no_repeat_ngram_size": 3}])
        if draw.random() < 0.4:
            case.options["stop"] = draw.sample(["a", "e", "de", " ", "\n", "(", "b)"], draw.choice([1, 3]))
        drafter = draw.choice(ENGINE_DRAFTERS)
        case.warm = isinstance(drafter, Adaptive) and draw.random() < 0.5
        case.method = {"drafter": drafter, "batch_size": bound}
        return case

    @free_head
    def difference(self) -> tuple[str, int]:
        """("" or what differs, tokens compared)."""
        if "bfloat16" in self.family and self.llm.path != "cpu":
            # On other paths, rounding in bfloat16 may depend on the other rows of the step.
            return f"{self.family} is on path {self.llm.path}", 0
        method = with_files(self.method, self.llm.vocabulary)
        if self.warm:
            drafter = method["drafter"]
            method = method | {"drafter": replace(drafter, state=AdaptiveState(drafter))}
            self.llm.generate(self.prompts, max_new_tokens=40, ignore_eos=True, **method)
        ours = self.llm.generate(self.prompts, **method, **self.options)
        tokens = 0
        for index, (prompt, result) in enumerate(zip(self.prompts, ours, strict=True)):
            options = self.options | {"seed": self.options["seed"] + index}
            plain = self.llm.generate(prompt, drafter=Plain(), **options)
            tokens += len(plain.tokens)
            for name in ("tokens", "text", "finish_reason"):
                if getattr(result, name) != getattr(plain, name):
                    return f"{name} of prompt {index}", tokens
        return "", tokens

    def __str__(self) -> str:
        sizes = [len(prompt) for prompt in self.prompts]
        warm = "warm" if self.warm else "cold"
        return f"case {self.number}: engine, {self.family}, prompts of {sizes}, {self.options}, {self.method}, {warm}"


def case_of(number: int) -> Case | EngineCase:
    return EngineCase.of(number) if number % 4 == 3 else Case.of(number)


@dataclass
class Report:
    """Counts and findings of a run.

    Attributes:
        cases: number of cases.
        tokens: number of tokens compared.
        engine: number of engine cases.
        families: number of cases per family.
        found: descriptions of the differences.
    """

    cases: int = 0
    tokens: int = 0
    engine: int = 0
    families: Counter[str] = field(default_factory=Counter)
    found: list[str] = field(default_factory=list)


def fuzz(seconds: float = 0.0, first: int = 0, tell: Any = None, least: int = 0) -> Report:
    """Run cases until the time is up.

    Args:
        seconds: time limit.
        first: number of the first case.
        tell: called with the report after each case.
        least: minimum number of cases.
    """
    report = Report()
    end = time.monotonic() + seconds
    number = first
    while time.monotonic() < end or report.cases < least:
        case = case_of(number)
        try:
            wrong, tokens = case.difference()
        except Exception as error:  # a crash is also a finding
            wrong = f"{type(error).__name__}: {error}"
            tokens = 0
        report.cases += 1
        report.tokens += tokens
        report.engine += isinstance(case, EngineCase)
        report.families[case.family.split()[0]] += 1
        if wrong:
            report.found.append(f"{case}: {wrong}")
        if tell is not None:
            tell(report)
        number += 1
    return report


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--first", type=int, default=0, help="number of the first case")
    parser.add_argument("--case", type=int, help="run one case and print what differs")
    parser.add_argument("--report", type=Path, help="write a page")
    given = parser.parse_args()
    warnings.simplefilter("ignore")
    transformers.logging.set_verbosity_error()

    # A single case.
    if given.case is not None:
        case = case_of(given.case)
        print(case)
        print(case.difference()[0] or "equal")
        return

    # A timed run with a progress bar.
    started = time.monotonic()

    from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (BarColumn(20), TimeRemainingColumn(), TextColumn("{task.description}"))
    with Progress(*columns) as bar:
        task = bar.add_task("", total=given.seconds)

        def tell(report: Report) -> None:
            said = f"{report.cases} cases, {report.tokens} tokens, {len(report.found)} differ"
            bar.update(task, completed=time.monotonic() - started, description=said)

        report = fuzz(given.seconds, given.first, tell)

    # The page.
    lines = [
        "# Differential fuzzing",
        "",
        f"`python tests/fuzz.py --seconds {given.seconds:.0f} --first {given.first}`",
        "",
        f"torch {torch.__version__}, CPU. {report.cases} pairs of calls over {len(report.families)} families, "
        f"{report.tokens} tokens compared with `model.generate` of transformers, and, of the engine, with plain "
        f"decoding ({report.engine} cases, float32, and bfloat16 on the compiled path): "
        f"**{len(report.found)} differ**.",
        "",
        *(f"- {line}" for line in report.found),
    ]
    page = "\n".join(lines).rstrip() + "\n"
    if given.report is not None:
        given.report.write_text(page)
    print(page)
    sys.exit(1 if report.found else 0)


if __name__ == "__main__":
    main()
