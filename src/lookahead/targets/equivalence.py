"""Does a path compute what the model computes? One check for every path: tree steps, compiled, captured, ranks.

A path evaluates a fixed trial (two prompts, two token trees each with a commit between them, single rows), and each
row of logits x is compared with the model's own causal pass over the same text. The distance is the relative L2
distance, both sides centred, since softmax knows no constant:

    e(x, r) = |(x - mean x) - (r - mean r)| / |r - mean r|

- float32, float64: r is the model's own pass, and e must stay below ``STRICT``.
- bfloat16, float16: rounding alone makes e large, and how large differs by a factor of ten from row to row. So r is
  the model evaluated in float32, and each row's e is divided by that of the model's own passes in the working dtype
  over the same text: the path must be at most ``FACTOR`` times as far from float32 as the model itself.

Beside it stands a negative control, through the same path: a tree in which two rows have one wrong ancestor and one
row is one position off. These rows must stand out by ``MARGIN`` times the difference found, or the trial could not
have shown such an error. Where a trial does not settle it, more trials with longer prompts are run, and each row's
median counts: a router of experts that tips over in one text is no error of the path, an error of the path is in all.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

import torch
from transformers import PreTrainedModel

from ..core import Target, TokenTree
from .attention_hook import implementation, takes_masks
from .facts import ModelFacts
from .float32 import HALF, in_float32

#: Largest relative distance in float32 and float64.
STRICT = 1e-3
#: Largest distance from float32 in 16 bits, in those of the model's own passes.
FACTOR = 3.0
#: How far the control must stand out, in differences.
MARGIN = 2.0
#: Prompt lengths (slots 0 and 1) of one trial after the other.
LENGTHS = ((6, 4), (9, 5), (14, 3), (4, 7), (20, 10))
#: Sliding windows and chunks up to this size are outgrown by the first prompt, on a CPU and elsewhere.
LONGEST_WINDOW = {"cpu": 128}
LONGEST_WINDOW_ELSEWHERE = 8192

_Found = TypeVar("_Found")
_memo: weakref.WeakKeyDictionary[Any, dict[str, tuple[Any, Any]]] = weakref.WeakKeyDictionary()


def remember(model: Any, name: str, key: Any, find: Callable[[], _Found]) -> _Found:
    """What ``find`` returns, found once per model and name as long as ``key`` stays the same."""
    known = _memo.setdefault(model, {})
    if name not in known or known[name][0] != key:
        known[name] = key, find()
    found: _Found = known[name][1]
    return found


def forget(model: Any, names: str = "") -> None:
    """Drop what is remembered of a model; with ``names`` only what begins so."""
    known = _memo.get(model, {})
    for name in [name for name in known if name.startswith(names)]:
        del known[name]


def fingerprint(model: torch.nn.Module) -> tuple[Any, ...]:
    """Changes when a weight is replaced or written, or a hook, the mode or the attention is changed."""
    weights = tuple(
        (p.data_ptr(), 0 if p.is_inference() else p._version, p.dtype) for p in model.parameters()
    )
    attention = getattr(getattr(model, "config", None), "_attn_implementation", None)
    return weights, hooks(model), model.training, attention


def hooks(model: torch.nn.Module) -> int:
    """How many forward hooks a model has."""
    return sum(len(m._forward_hooks) + len(m._forward_pre_hooks) for m in model.modules())


@dataclass(frozen=True, slots=True)
class Equivalence:
    """What a comparison found.

    Attributes:
        ok: the path may be used.
        difference: of the worst row: in 16 bits the factor over the model's own error, else the relative L2
            distance. NaN where nothing could be compared.
        control: the same of the weaker of the two deliberate errors.
        limit: what ``difference`` may be.
        noise: the model's own relative error against float32, root mean square; 0 in float32 and float64.
        reason: the figures in words.
    """

    ok: bool
    difference: float
    control: float
    limit: float
    noise: float
    reason: str

    @property
    def margin(self) -> float:
        """How far the control stands out; ``MARGIN`` is asked for."""
        return self.control / max(self.difference, 1e-12)


def trial_tree(token: int, vocabulary: int) -> TokenTree:
    """Eight rows with branches at two depths, so that order in the cache and position differ.

    Rows: root 0, its chains 1-2-3 and 4-5, and 6-7 beside 2-3 under 1.
    """
    ids = [(token * (i + 3) + 11 * i + 5) % vocabulary for i in range(9)]
    return _tree(ids, vocabulary, [0, 1, 2, 0, 4, 1, 6])


def _tree(ids: Sequence[int], vocabulary: int, parents: Sequence[int]) -> TokenTree:
    tree = TokenTree(ids[0])
    for row, parent in enumerate(parents, 1):
        token = ids[row]
        while tree.child(parent, token) is not None:
            token = (token + 1) % vocabulary
        tree.add(token, parent, needs_logits=True)
    return tree


def _wrong_tree(tree: TokenTree, vocabulary: int) -> TokenTree:
    """Rows 5 and 7 hang on another parent of the same depth, row 3 is one position off."""
    wrong = _tree(tree.tokens, vocabulary, [0, 1, 2, 0, 1, 1, 2])
    wrong.tokens = list(tree.tokens)
    wrong.depths[3] += 1
    return wrong


#: Rows of ``_wrong_tree`` with a wrong ancestor and at a wrong position.
WRONG_ANCESTOR, WRONG_POSITION = (5, 7), (3,)
#: Rows that a trial accepts: they lie neither side by side nor in place.
PATH = (0, 1, 6, 7)


class Trial:
    """Prompts and trees for one comparison.

    Args:
        facts: of the model.
        number: which of the trials; they differ in tokens and prompt lengths.
    """

    def __init__(self, facts: ModelFacts, number: int, device: str) -> None:
        vocabulary = facts.vocabulary
        self.vocabulary = vocabulary
        generator = torch.Generator().manual_seed(number)
        first, second = LENGTHS[number]
        span = max(facts.kinds.sliding_window, facts.kinds.chunk)
        longest = LONGEST_WINDOW.get(device, LONGEST_WINDOW_ELSEWHERE)
        if not number and span <= min(longest, facts.max_positions - 16, facts.rope_boundary - 16):
            first = max(first, span + 2)
        low = min(3, vocabulary - 1)  # the first tokens of a vocabulary are often special
        self.prompts = [
            torch.randint(low, vocabulary, (n,), generator=generator).tolist() for n in (first, second)
        ]
        self.trees = [
            [trial_tree(13 + 4 * number + 2 * turn + b, vocabulary) for b in (0, 1)] for turn in (0, 1)
        ]
        self.singles = [(17 + number) % vocabulary, (29 + number) % vocabulary]

    def texts(self) -> list[list[int]]:
        """What each row of logits stands behind, in the order of ``run``."""
        texts = [list(prompt) for prompt in self.prompts]
        found = [list(text) for text in texts]
        for trees in self.trees:
            for b, tree in enumerate(trees):
                found += [texts[b] + tree.path_tokens(node) for node in range(len(tree))]
            texts = [text + [tree.tokens[n] for n in PATH] for text, tree in zip(texts, trees, strict=True)]
        return found + [texts[0] + self.singles[: i + 1] for i in range(len(self.singles))]

    def run(self, target: Target, together: bool) -> tuple[torch.Tensor, torch.Tensor]:
        """The path's logits: (rows, V) as in ``texts``, and (8, V) of the wrong tree in the first turn, slot 0.

        Args:
            together: both sequences in one pass; else each in its own.
        """
        rows = [scores.row(0).float().cpu() for scores in target.prefill(list(enumerate(self.prompts)))]
        wrong = self._forward(target, [(0, _wrong_tree(self.trees[0][0], self.vocabulary))], together)
        for trees in self.trees:
            rows += self._forward(target, list(enumerate(trees)), together)
            target.commit([(b, PATH) for b in range(len(trees))])
        for token in self.singles:
            rows += self._forward(target, [(0, TokenTree(token))], together)
            target.commit([(0, [0])])
        for slot in range(len(self.prompts)):
            target.release(slot)
        return torch.stack(rows), torch.stack(wrong)

    @staticmethod
    def _forward(target: Target, trees: list[tuple[int, TokenTree]], together: bool) -> list[torch.Tensor]:
        passes = [trees] if together else [[pair] for pair in trees]
        rows = []
        for several in passes:
            for scores, (_, tree) in zip(target.forward(several), several, strict=True):
                rows += [scores.row(node).float().cpu() for node in tree.needs_logits_nodes()]
        return rows

    def causal(self, model: PreTrainedModel, halves: bool = False) -> torch.Tensor:
        """The same rows by the model's own passes: no cache, no mask, short texts padded behind their end.

        Args:
            halves: in two passes, of other widths and row counts than the one.
        """
        texts = self.texts()
        leaves = [a for a in texts if not any(len(b) > len(a) and b[: len(a)] == a for b in texts)]
        leaves = sorted({tuple(leaf) for leaf in leaves}, key=len)
        cuts = [leaves[: len(leaves) // 2], leaves[len(leaves) // 2 :]] if halves else [leaves]
        found: dict[tuple[int, ...], torch.Tensor] = {}
        for some in cuts:
            width = max(map(len, some))
            ids = torch.tensor([leaf + leaf[-1:] * (width - len(leaf)) for leaf in some], device=model.device)
            with torch.no_grad():
                logits = model(input_ids=ids, use_cache=False, return_dict=True).logits
            for text in texts:
                for leaf, row in zip(some, logits, strict=True):
                    if leaf[: len(text)] == tuple(text):
                        found[tuple(text)] = row[len(text) - 1].float().cpu()
        return torch.stack([found[tuple(text)] for text in texts])


@dataclass(frozen=True, slots=True)
class _Reference:
    """A trial's right logits (rows, V), and the distance that counts as 1 for each row."""

    rows: torch.Tensor
    unit: torch.Tensor
    noise: float


def _reference(model: PreTrainedModel, trial: Trial) -> _Reference:
    with nullcontext() if takes_masks(model) else implementation(model, "sdpa"):
        return _masked_reference(model, trial)


def _masked_reference(model: PreTrainedModel, trial: Trial) -> _Reference:
    own = trial.causal(model)
    if model.dtype not in HALF:
        return _Reference(own, torch.ones(len(own), dtype=torch.float64), 0.0)
    other = trial.causal(model, halves=True)
    try:
        with in_float32(model):
            exact = trial.causal(model)
        errors = torch.maximum(distance(own, exact), distance(other, exact))
    except (RuntimeError, TypeError, ValueError, NotImplementedError):
        # Quantised weights, say: what is left is how far two right evaluations are apart.
        exact = own
        errors = 2 * distance(other, own)
        errors = errors.new_full(errors.shape, float(errors.max()))
    unit = torch.maximum(errors, errors.median()).clamp(min=1e-6)
    return _Reference(exact, unit, float(errors.pow(2).mean().sqrt()))


def distance(rows: torch.Tensor, exact: torch.Tensor) -> torch.Tensor:
    """e of each row, (rows,) float64; infinite where a logit is NaN."""
    found = []
    for x, r in zip(rows, exact, strict=True):
        apart, size = (x - r).double(), r.double()
        apart, size = apart - apart.mean(), size - size.mean()
        found.append(apart.norm() / size.norm().clamp(min=1e-30))
    return torch.stack(found).nan_to_num(nan=torch.inf)


def compare(
    model: PreTrainedModel, facts: ModelFacts, make_target: Callable[[], Target], together: bool = True
) -> Equivalence:
    """Compare a path with the model's own causal passes.

    Args:
        make_target: a fresh target of the path, for each trial.
        together: see ``Trial.run``.

    Raises:
        OutOfMemory: a pass did not fit. Other errors are those of the path.
    """
    half = model.dtype in HALF
    limit = FACTOR if half else STRICT
    rows: list[torch.Tensor] = []
    controls: list[torch.Tensor] = []
    noise = 0.0
    for number in range(len(LENGTHS)):
        trial = Trial(facts, number, model.device.type)
        reference = remember(model, f"trial {number}", fingerprint(model), partial(_reference, model, trial))
        noise = max(noise, reference.noise)
        found, wrong = trial.run(make_target(), together)
        rows.append(distance(found, reference.rows) / reference.unit)
        behind = slice(len(trial.prompts), len(trial.prompts) + len(wrong))
        controls.append(distance(wrong, reference.rows[behind]) / reference.unit[behind])
        # The median of two or four is a smaller one: only odd numbers of trials settle it.
        both = [torch.stack(several).median(dim=0).values for several in (rows, controls)]
        difference = float(both[0].max())
        control = min(float(both[1][list(wrong)].max()) for wrong in (WRONG_ANCESTOR, WRONG_POSITION))
        ok = difference <= limit and control >= MARGIN * difference
        if ok and number % 2 == 0:
            break
    unit = " times the model's own error" if half else ""
    beside = f" of {noise:.1e} in {str(model.dtype).removeprefix('torch.')}" if half else ""
    reason = (
        f"difference {difference:.2g}{unit}{beside}, {limit:g} allowed; "
        f"a wrong ancestor or position shows as {control:.2g}"
    )
    return Equivalence(ok, difference, control, limit, noise, reason)


def first_line(error: BaseException) -> str:
    """An error's type and first line, for a reason in one line."""
    return f"{type(error).__name__}: {(str(error).splitlines() or [''])[0][:160]}"
