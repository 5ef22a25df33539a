"""Differential fuzzing: random requests, decoded with drafts and without, and compared token for token.

    python tests/fuzz.py --cases 10000 --report build/soak.md       the long form (make soak)
    python tests/fuzz.py --case 1234                                repeat one case, and print it as a script

A case's number determines everything. Even cases call ``model.generate`` of transformers with and without lookahead:
model family, weights, padding, lengths near powers of two and near the context limit, drafting method, sampling,
penalties, end tokens, outputs. Both calls seed torch's generator identically, so sampled completions and the
generator's final state must be equal too. Returned scores must be equal up to rounding, and a filter (top-k, top-p,
min-p) must keep the same tokens, unless transformers too keeps others when its logits move by its own rounding.

Odd cases drive the engine as the server does: tiny models of transformers, tiny GGUF files and, rarely, the real
default model; every drafter; sampling, filters, penalties, excluded words, stop strings, grammars; batches, chunks of
prompts, a prefix cache, a row budget; sequences that join late or are cancelled; steps in other threads and on
another number of threads; an interrupt in the middle of a step; and NaN in the rows of drafts. Each completion must
be that of plain decoding of its prompt alone, or its beginning if it was cancelled.

On the cost curve used here, rows are nearly free. By real costs, drafting would hardly ever pay for tiny models.
"""

from __future__ import annotations

import argparse
import atexit
import functools
import random
import signal
import sys
import tempfile
import time
import warnings
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import torch
import transformers

import learned
import lookahead
import toy
from families import FAMILIES, tiny_model
from gguf_files import write_gguf
from lookahead import Adaptive, AdaptiveState, Jacobi, Lookahead, Plain, PromptLookup
from lookahead.core import NumericalError
from lookahead.drafters.adaptive import model_curves
from lookahead.drafters.adaptive.cost import CostCurve
from lookahead.drafters.adaptive.sources.head_file import HeadWeights
from lookahead.options import Options
from lookahead.server import grammar
from lookahead.threads import set_thread_count, thread_count

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
    Adaptive(sources=("suffix", "jacobi"), chain=True, max_rows=40),
    Adaptive(sources=("logits",), top=3, max_entries=1000),
    Lookahead(5, 3, 5),
    Lookahead(15, 5, 15),
    Lookahead(1, 2, 0),
    Jacobi(),
    PromptLookup(),
]
#: (architecture, block types) of tiny GGUF files.
FILES = (
    ("llama", ("Q8_0", "Q4_K", "Q6_K", "F16")),
    ("gemma2", ("Q4_K", "Q6_K")),
    ("qwen2", ("Q4_1", "Q8_0")),
    ("qwen3", ("F32",)),
    ("gpt2", ("Q5_1", "BF16")),
    ("phi3", ("Q4_0",)),
    ("olmo2", ("Q5_K", "Q5_0")),
)
#: How often transformers decodes with its logits moved by its rounding, before a difference counts as a fault; and
#: the largest rounding of float32 logits, relative to the largest of them.
MOVES, LARGEST = 16, 1e-5
#: What a completion may have to match, as in ``server.grammar.Constraint``.
CONSTRAINTS = (
    ("regex", "[a-f ]{5,60}"),
    ("json", {"type": "object", "properties": {"a": {"type": "integer"}, "b": {"enum": ["x", "yy"]}}}),
    ("lark", 'start: ("def " | "the " | /[0-9]+/)+'),
)
SENTENCES = (
    "def add(a, b):\n    return",
    "The capital of Japan is",
    "1, 2, 3, 1, 2, 3, 1,",
    "once upon a time",
)


def nearly_free(*_: Any) -> CostCurve:
    """A cost curve on which 64 rows cost little more than one."""
    return CostCurve({0: {1: 1.0, 64: 1.1, 256: 1.5}})


class Forced(ExitStack):
    """Cases run in this context. A head has more weights than these models, so by its cost it would hardly ever be
    called; and a grammar may take its time, because other work may slow it down."""

    def __enter__(self) -> Forced:
        self.enter_context(warnings.catch_warnings())
        warnings.filterwarnings("ignore", "the logits of a step were NaN")
        self.enter_context(mock.patch.object(HeadWeights, "parameter_count", 0))
        self.enter_context(mock.patch.object(model_curves, "load_curve", nearly_free))
        self.enter_context(mock.patch.object(grammar, "ALLOWANCE", 1e9))
        return super().__enter__()


@functools.cache
def learned_folder() -> Path:
    """A folder, for the time of this process."""
    folder = tempfile.TemporaryDirectory()
    atexit.register(folder.cleanup)
    return Path(folder.name)


@functools.cache
def learned_files(vocabulary: int, hidden: int = 64) -> dict[str, str]:
    """A random light head and a base table of random text, by the name that stands for each."""
    files = {name: learned_folder() / f"{name}-{vocabulary}-{hidden}" for name in (HEAD, TABLE)}
    learned.random_head(vocabulary, hidden).save(files[HEAD])
    draw = random.Random(vocabulary)
    texts = [[draw.randrange(3, vocabulary) for _ in range(64)] for _ in range(80)]
    learned.save_table(files[TABLE], vocabulary, texts)
    return {name: str(file) for name, file in files.items()}


def with_files(drafter: Any, vocabulary: int, hidden: int = 64) -> Any:
    """A drafter with the files that it names."""
    names = {setting: getattr(drafter, setting, None) for setting in ("head", "table")}
    given = {setting: learned_files(vocabulary, hidden)[name] for setting, name in names.items() if name}
    return replace(drafter, **given) if given else drafter


@functools.lru_cache(maxsize=256)
def model_of(family: str, seed: int, spread: float, window: int = 0) -> Any:
    sliding = {"sliding_window": window} if window else {}
    model = tiny_model(family, seed=seed, initializer_range=spread, **sliding)
    model.generation_config.eos_token_id = None
    return model


@functools.lru_cache(maxsize=256)
def engine_of(family: str, seed: int, dtype: str, window: int = 0) -> Any:
    sliding = {"sliding_window": window} if window else {}
    model = tiny_model(family, seed=seed, vocab_size=toy.VOCABULARY, initializer_range=0.1, **sliding)
    model = model.to(getattr(torch, dtype))
    return lookahead.LLM(model, toy.tokenizer(), drafter=Adaptive(rows=16))


@functools.cache
def file_of(number: int, seed: int) -> Any:
    """A GGUF file with packed weights."""
    path = learned_folder() / f"{number}-{seed}.gguf"
    write_gguf(path, *FILES[number], seed=seed)
    return lookahead.load(path)


@functools.cache
def real() -> Any:
    """The default model."""
    return lookahead.load()


class Moved(transformers.LogitsProcessor):
    """Moves each logit by at most ``most``."""

    def __init__(self, most: float, seed: int) -> None:
        self._most = most
        self._draw = torch.Generator().manual_seed(seed)  # the global one draws tokens

    def __call__(self, ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        return scores + self._most * (2 * torch.rand(scores.shape, generator=self._draw) - 1)


class NaNs:
    """The scores of a tree of which some rows are NaN."""

    def __init__(self, scores: Any, rows: set[int]) -> None:
        self._scores = scores
        self._rows = rows

    def best(self, node: int) -> int:
        if node in self._rows:
            raise NumericalError("NaN")
        return int(self._scores.best(node))

    def __getattr__(self, name: str) -> Any:
        return getattr(self._scores, name)

    def top(self, nodes: Any, k: int) -> Any:
        ids, odds = (np.array(part) for part in self._scores.top(nodes, k))
        odds[[node in self._rows for node in nodes]] = np.nan
        return ids, odds


class Disturbed:
    """A target that fails in ways after which the completion must be the same.

    Args:
        target: evaluates the rows.
        draw: random numbers.
        nans: how often rows of drafts are NaN; those of a tree with one row never are.
        interrupt: the number of the forward pass that Ctrl-C interrupts, before or after it; None for none.
    """

    def __init__(self, target: Any, draw: random.Random, nans: float, interrupt: int | None) -> None:
        self._target = target
        self._draw = draw
        self._nans = nans
        self._interrupt = interrupt
        self._passes = 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._target, name)

    def forward(self, trees: Any) -> Any:
        self._passes += 1
        due = self._passes == self._interrupt
        if due and self._draw.random() < 0.5:
            raise KeyboardInterrupt
        scores = self._target.forward(trees)
        if due:
            raise KeyboardInterrupt
        return [
            NaNs(each, {node for node in range(len(tree)) if self._draw.random() < 0.3})
            if len(tree) > 1 and self._draw.random() < self._nans
            else each
            for each, (_, tree) in zip(scores, trees, strict=True)
        ]


def decode(
    llm: Any,
    prompts: Sequence[Any],
    drafter: Any,
    options: dict[str, Any],
    *,
    seed: int = 0,
    constraint: tuple[str, Any] | None = None,
    most: int = 1,
    late: float = 0.0,
    cancel: float = 0.0,
    nans: float = 0.0,
    interrupt: int | None = None,
    threads: Sequence[int] = (),
    elsewhere: bool = False,
    **engine_options: Any,
) -> list[tuple[list[int], str, str | None]]:
    """Decode prompts as the server does. Returns (tokens, text, finish reason) of each; None if it was interrupted.

    Args:
        seed: of the completions (prompt i uses seed + i), and of everything that happens to them.
        constraint: what each completion must match.
        most: how many sequences run at once.
        late, cancel: how likely a sequence waits for a step, and is cancelled in it.
        nans, interrupt: as in ``Disturbed``.
        threads: numbers of threads, in turn.
        elsewhere: whether every other step runs in another thread.
        **engine_options: of ``LLM.engine``.
    """
    draw = random.Random(seed)
    chosen = Options(**options)
    process = grammars_of(llm).process(grammar.Constraint(*constraint, "it")) if constraint else None
    requests = []
    for number, prompt in enumerate(prompts):
        follow = process.copy() if process is not None else None
        own = replace(chosen, logits_processor=follow) if follow is not None else chosen
        request = llm.prepare(prompt, own, seed + number if own.sampled else None)
        request.drafter = drafter
        request.finished = follow.accept if follow is not None else None
        requests.append(request)
    engine = llm.engine(max_sequences=most, **engine_options)
    engine.target = Disturbed(engine.target, draw, nans, interrupt)
    before, steps = thread_count(), 0
    sequences: list[Any] = []
    with ThreadPoolExecutor(1) as pool:
        try:
            while engine.busy or len(sequences) < len(requests):
                while len(sequences) < len(requests) and not (engine.busy and draw.random() < late):
                    sequences.append(engine.add(requests[len(sequences)]))
                if draw.random() < cancel:
                    engine.cancel(draw.choice(sequences))
                if threads:
                    set_thread_count(threads[steps % len(threads)])
                steps += 1
                with llm.model.lock(engine.target):
                    pool.submit(engine.step).result() if elsewhere and steps % 2 else engine.step()
        except KeyboardInterrupt:
            pass
        finally:
            engine.close()
            set_thread_count(before)
    sequences += [None] * (len(requests) - len(sequences))
    return [
        ([], "", None)
        if each is None
        else (each.tokens, each.request.detokenizer.text, each.finish_reason if each.result else None)
        for each in sequences
    ]


@functools.cache
def grammars_of(llm: Any) -> grammar.Grammars:
    return grammar.Grammars(llm)


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
    made: str = ""

    @property
    def model(self) -> Any:
        return eval(self.made)

    @classmethod
    def of(cls, number: int) -> Case:
        # The model.
        draw = random.Random(number)
        case = cls(number, family=draw.choice(FAMILIES))
        seed = draw.randrange(2)
        spread = draw.choice([0.05, 0.1, 0.2])
        window = draw.choice([4, 8, 17, 64])
        case.made = f"model_of({case.family!r}, {seed}, {spread}, {window if case.family in SLIDING else 0})"

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
        """(output, final state of the generator). Arguments replace options."""
        model = self.model  # making one seeds the generator
        torch.manual_seed(self.number)
        out = model.generate(self.ids, attention_mask=self.mask, **self.options | ours)
        return out, torch.random.get_rng_state()

    def difference(self) -> tuple[str, int]:
        """("" or what differs, tokens compared)."""
        if self.family in ALONE:
            # transformers keeps the longest sequence's frequencies until a short one resets them.
            self.model(torch.ones(1, 1, dtype=torch.long))
        plain, plain_state = self.run()
        drafter = with_files(self.method.get("drafter"), self.model.config.get_text_config().vocab_size)
        with Forced():
            ours, state = self.run(custom_generate=lookahead.generate, drafter=drafter)
        pair = [out if torch.is_tensor(out) else out.sequences for out in (ours, plain)]
        tokens = (pair[1].shape[1] - self.ids.shape[1]) * len(self.ids)
        if pair[0].tolist() != pair[1].tolist():
            return "tokens", tokens
        if not torch.equal(state, plain_state):
            return "the generator's state", tokens
        if not torch.is_tensor(plain):
            if len(ours.scores) != len(plain.scores):
                return "the number of scores", tokens
            if plain.scores and self.wrong_scores(torch.stack(ours.scores), torch.stack(plain.scores)):
                return "scores", tokens
        return "", tokens

    def wrong_scores(self, ours: torch.Tensor, plain: torch.Tensor) -> bool:
        """Whether scores (steps, sequences, V) differ by more than rounding."""
        kept, expected = ours != -torch.inf, plain != -torch.inf
        both = kept & expected
        if not torch.allclose(ours[both], plain[both], rtol=1e-3, atol=1e-3):
            return True
        others = (kept != expected).any(-1).nonzero().tolist()
        return bool(others) and not self._ties(kept, others)

    def _ties(self, kept: torch.Tensor, places: list[list[int]]) -> bool:
        """Whether filters keep the same tokens in transformers when rounding moves its logits.

        Its rounding is the largest difference between its logits with and without a KV cache.

        Args:
            kept: which tokens our filters keep; shape (steps, sequences, V).
            places: the (step, sequence) pairs to compare.
        """
        first = {"max_new_tokens": 1 + max(step for step, _ in places)}
        pair = [self.run(**first, output_logits=True, use_cache=cache)[0] for cache in (True, False)]
        logits = [torch.stack(out.logits) for out in pair]
        rounding = float((logits[0] - logits[1]).abs().max())
        if not torch.equal(*(out.sequences for out in pair)) or rounding > LARGEST * logits[0].abs().max():
            return False

        # A sequence that moved to another token says nothing.
        left = {(step, row) for step, row in places}
        for seed in range(MOVES):
            moved, _ = self.run(**first, logits_processor=[Moved(rounding, seed)])
            if torch.equal(moved.sequences, pair[0].sequences):
                left -= {at for at in left if torch.equal(moved.scores[at[0]][at[1]] != -torch.inf, kept[at])}
            if not left:
                return True
        return False

    def __str__(self) -> str:
        shape = f"{len(self.ids)} x {self.ids.shape[1]} tokens"
        return f"case {self.number}: {self.family}, {shape}, {self.options}, {self.method}"

    def script(self) -> str:
        """The case as a program without this class."""
        vocabulary = self.model.config.get_text_config().vocab_size
        return f"""{START}
model = fuzz.{self.made}
ids = torch.tensor({self.ids.tolist()})
mask = torch.tensor({self.mask.tolist()})
options = {self.options}
drafter = fuzz.with_files(as_drafter({str(self.method.get("drafter", Adaptive()))!r}), {vocabulary})

def run(**ours):
    torch.manual_seed({self.number})
    out = model.generate(ids, attention_mask=mask, **options, **ours)
    return (out if torch.is_tensor(out) else out.sequences).tolist()

plain = run()
with fuzz.Forced():
    ours = run(custom_generate=lookahead.generate, drafter=drafter)
print(plain, ours, "equal" if plain == ours else "differ", sep="\\n")
"""


@dataclass
class EngineCase(Numbered):
    """A list of prompts, decoded by an engine.

    Attributes:
        made: the expression that makes the LLM.
        how: further arguments of ``decode``.
        warm: whether the drafter has a state, which the same prompts filled.
    """

    prompts: list[Any] = field(default_factory=list)
    made: str = ""
    how: dict[str, Any] = field(default_factory=dict)
    warm: bool = False

    @property
    def llm(self) -> Any:
        return eval(self.made)

    @classmethod
    def of(cls, number: int) -> EngineCase:
        draw = random.Random(number)
        case = cls(number)
        alone = case._choose_model(draw)
        case._draw_prompts(draw, alone)
        case._draw_options(draw)

        # The drafter, and what happens to the sequences.
        drafter = draw.choice(ENGINE_DRAFTERS)
        case.method = {"drafter": drafter}
        case.warm = isinstance(drafter, Adaptive) and draw.random() < 0.3
        case.how["most"] = 1 if alone else draw.choice([1, 2, 5])
        kept = draw.choice([0, 0, 1, 3])
        case.how |= draw.choice([{}, {"prompt_rows": draw.choice([1, 5, 16])}])
        case.how |= {"prefix_cache": kept} if kept else {}
        for chance, more in (
            (0.2, {"row_budget": draw.choice([1, 9, 40])}),
            (0.3, {"late": 0.7}),
            (0.1, {"cancel": 0.05}),
            (0.15, {"nans": 0.3}),
            (0.05, {"interrupt": draw.randrange(1, 12)}),
            (0.1, {"threads": [1, 2]}),
            (0.1, {"elsewhere": True}),
        ):
            if draw.random() < chance:
                case.how |= more
        if "nans" in case.how:  # rows of a chunk of a prompt are not drafts
            case.how.pop("prompt_rows", None)
        return case

    def _choose_model(self, draw: random.Random) -> bool:
        """Choose the model. Returns whether its sequences are decoded one at a time."""
        kind = draw.random()
        if kind < 0.01:
            self.family, self.made = "real", "real()"
            return False
        seed = draw.randrange(2)
        if kind < 0.4:
            number = draw.randrange(len(FILES))
            self.family, self.made = f"gguf {FILES[number]}", f"file_of({number}, {seed})"
            return False
        dtype = draw.choice(["float32", "bfloat16"])
        family = draw.choice(COMPILED if dtype == "bfloat16" else FAMILIES)
        window = draw.choice([4, 8, 17, 64]) if family in SLIDING else 0
        self.family, self.made = f"{family} {dtype}", f"engine_of({family!r}, {seed}, {dtype!r}, {window})"
        return family in ALONE

    def _draw_prompts(self, draw: random.Random, alone: bool) -> None:
        count = 1 if self.family == "real" else draw.randrange(1, 6)
        stretch: list[int] = []
        for _ in range(count):
            if self.family == "real":
                self.prompts.append(draw.choice(SENTENCES))
                continue
            if not stretch or draw.random() < 0.6:  # else a prompt with the prefix of the one before
                stretch = [3 + draw.randrange(60) for _ in range(draw.choice([1, 3, 9, 40]))]
            ids = (stretch * 40)[: draw.choice([1, 2, 16, 33, 64, 130])]
            if alone:  # the engine rejects prompts beyond the trained length
                ids = ids[:33]
            text = "" if draw.random() < 0.5 else self.llm.tokenizer.decode(ids) or "x"
            # A byte of its own may become several tokens.
            fits = text and len(self.llm.tokenizer(text).input_ids) < 150
            self.prompts.append(text if fits else ids)

    def _draw_options(self, draw: random.Random) -> None:
        new = 16 if self.family == "real" else draw.choice([1, 2, 15, 33, 64, 100])
        self.options = {"max_new_tokens": new, "ignore_eos": draw.random() < 0.7}
        if draw.random() < 0.5:
            self.options |= {"temperature": draw.choice([0.3, 0.7, 1.0, 1.3])}
            self.options |= draw.choice(
                [{}, {}, {"top_k": 5}, {"top_p": 0.8}, {"min_p": 0.05}, {"typical_p": 0.9}]
            )
        if draw.random() < 0.3:
            self.options |= draw.choice(
                [
                    {"repetition_penalty": 1.2},
                    {"no_repeat_ngram_size": 3},
                    {"min_new_tokens": min(5, new)},
                    {"bad_words": [[5], [7, 8]]},
                ]
            )
        if draw.random() < 0.4:
            self.options["stop"] = draw.sample(["a", "e", "de", " ", "\n", "(", "b)"], draw.choice([1, 3]))
        if draw.random() < 0.1:
            self.how["constraint"] = draw.choice(CONSTRAINTS)
            self.options["ignore_eos"] = False

    def difference(self) -> tuple[str, int]:
        """("" or what differs, tokens compared)."""
        llm = self.llm
        if "bfloat16" in self.family and llm.path != "cpu":
            # On other paths, rounding in bfloat16 may depend on the other rows of the step.
            return f"{self.family} is on path {llm.path}", 0
        shape = llm.model.shape
        drafter = with_files(self.method["drafter"], shape.vocabulary, shape.hidden)
        tokens = 0
        with Forced():
            if self.warm:
                drafter = replace(drafter, state=AdaptiveState(drafter))
                llm.generate(self.prompts, max_new_tokens=40, ignore_eos=True, drafter=drafter)
            ours = decode(llm, self.prompts, drafter, self.options, seed=self.number, **self.how)
            alone = {"constraint": self.how.get("constraint")}
            for index, (prompt, found) in enumerate(zip(self.prompts, ours, strict=True)):
                seed = self.number + index
                (plain,) = decode(llm, [prompt], Plain(), self.options, seed=seed, **alone)
                tokens += len(found[0])
                if found != plain and not is_beginning(found, plain):
                    return f"prompt {index}: {found}, not {plain}", tokens
        return "", tokens

    def __str__(self) -> str:
        sizes = [len(prompt) for prompt in self.prompts]
        warm = "warm" if self.warm else "cold"
        return (
            f"case {self.number}: engine, {self.family}, prompts of {sizes}, {self.options}, {self.method}, "
            f"{self.how}, {warm}"
        )

    def script(self) -> str:
        """The case as a program without this class; a state that was filled before is not in it."""
        shape = self.llm.model.shape
        return f"""{START}
llm = fuzz.{self.made}
prompts = {self.prompts}
options = {self.options}
drafter = fuzz.with_files(as_drafter({str(self.method["drafter"])!r}), {shape.vocabulary}, {shape.hidden})
how = {self.how}
with fuzz.Forced():
    ours = fuzz.decode(llm, prompts, drafter, options, seed={self.number}, **how)
    for i, prompt in enumerate(prompts):
        alone = {{"seed": {self.number} + i, "constraint": how.get("constraint")}}
        (plain,) = fuzz.decode(llm, [prompt], Plain(), options, **alone)
        same = ours[i] == plain or fuzz.is_beginning(ours[i], plain)
        print(plain, ours[i], "equal" if same else "differ", sep="\\n")
"""


#: The first lines of a script, to run in the project's folder.
START = """import sys
sys.path.insert(0, "tests")
import torch, fuzz, lookahead
from lookahead import Plain
from lookahead.drafters import as_drafter"""


def is_beginning(found: Any, plain: Any) -> bool:
    """Whether a completion was cancelled or interrupted, and is the beginning of the plain one."""
    tokens, _, reason = found
    return reason in (None, "cancelled") and plain[0][: len(tokens)] == tokens


def case_of(number: int) -> Case | EngineCase:
    return EngineCase.of(number) if number % 2 else Case.of(number)


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


def fuzz(
    seconds: float = 0.0,
    first: int = 0,
    tell: Any = None,
    least: int = 0,
    goes_on: Callable[[], bool] = lambda: True,
) -> Report:
    """Run cases until the time is up and there are enough.

    Args:
        seconds: time limit.
        first: number of the first case.
        tell: called with the report after each case.
        least: minimum number of cases.
        goes_on: called before each case; False ends the run.
    """
    report = Report()
    end = time.monotonic() + seconds
    number = first
    while (time.monotonic() < end or report.cases < least) and goes_on():
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
            report.found.append(f"{case}: {wrong}\n\n{case.script()}")
        if tell is not None:
            tell(report)
        number += 1
    return report


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--cases", type=int, default=0, help="at least this many cases")
    parser.add_argument("--seconds", type=float, default=0.0, help="and at least this many seconds")
    parser.add_argument("--quiet-file", type=Path, help="pause while this file exists")
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
        print(case.script())
        print(case.difference()[0] or "equal")
        return

    # A run with a progress bar. After SIGTERM, it reports what it has found.
    started = time.monotonic()
    ended: list[int] = []
    signal.signal(signal.SIGTERM, lambda number, frame: ended.append(number))

    from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (BarColumn(20), TimeRemainingColumn(), TextColumn("{task.description}"))
    with Progress(*columns) as bar:
        task = bar.add_task("", total=given.cases or given.seconds)

        def tell(report: Report) -> None:
            said = f"{report.cases} cases, {report.tokens} tokens, {len(report.found)} differ"
            done = report.cases if given.cases else time.monotonic() - started
            bar.update(task, completed=done, description=said)

        def goes_on() -> bool:
            while given.quiet_file is not None and given.quiet_file.exists() and not ended:
                time.sleep(1)
            return not ended

        report = fuzz(given.seconds, given.first, tell, given.cases, goes_on)

    # The page.
    lines = [
        "# Differential fuzzing",
        "",
        f"`python tests/fuzz.py --cases {given.cases} --seconds {given.seconds:.0f} --first {given.first}`",
        "",
        f"torch {torch.__version__}, CPU. {report.cases} cases over {len(report.families)} kinds of models, "
        f"{report.tokens} tokens: {report.cases - report.engine} compared with `model.generate` of transformers, and "
        f"{report.engine} of the engine with plain decoding of each prompt alone "
        f"({report.families['gguf']} on packed weights, {report.families['real']} on the real default model; others "
        f"in float32, or bfloat16 on the compiled path): **{len(report.found)} differ**.",
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
