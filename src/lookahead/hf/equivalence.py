"""Check that a path computes what the model computes. One check for all paths: tree steps, compiled and captured
passes.

A path evaluates a fixed trial, and each row x of its logits is compared with a row r of the model's own causal pass
over the same tokens. The error of a row is the relative L2 distance. Both rows are centred first, because softmax
does not change when a constant is added to all logits:

    e(x, r) = |(x - mean x) - (r - mean r)| / |r - mean r|

- float32 and float64: r is the model's own pass, and e must stay below ``Trial.tolerance``.
- bfloat16 and float16: rounding alone makes e large, and ten times larger in some rows than in others. So r is
  computed by the model in float32, and e is divided by the error of the model's own pass in its dtype, row by row. In
  each row the path may be at most ``MAX_ROW_FACTOR`` times as far from float32 as the model itself, and
  ``MAX_MEAN_FACTOR`` times over all rows. Two means must meet the latter limit: the root mean square reveals a large
  error in some rows, the geometric mean a small error in all rows, which a few large rounding errors would hide.

The negative control is evaluated on the same path. It is a tree in which two rows have a wrong ancestor and one is
off by one position. The errors of these rows must be at least ``CONTROL_MARGIN`` times the largest error of the
correct rows; otherwise the trial could not detect such a fault. A failed trial is repeated with different prompts,
and one success is enough: rounding may flip the choice of an expert router for one prompt, but a faulty path fails
for all.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from threading import get_ident
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from ..core import SettingsError, Target, TokenTree
from ..limits import Equivalence
from .attention_hook import mask_compatible_attention
from .facts import PassFacts
from .fingerprint import remember

if TYPE_CHECKING:
    from transformers import PreTrainedModel

#: Largest error of a row in 16 bits, as a multiple of the error of the model's own pass.
MAX_ROW_FACTOR = 3.0
#: The same for the means over all rows.
MAX_MEAN_FACTOR = 1.5
#: Smallest error of the negative control, as a multiple of the largest error of the correct rows.
CONTROL_MARGIN = 2.0
#: Dtypes judged by the model's own rounding error.
HALF_DTYPES = (torch.bfloat16, torch.float16)

# ------------------------------------------------------------------------------------------------ the trial

#: Prompt lengths of slots 0 and 1, for each trial.
PROMPT_LENGTHS = ((6, 4), (9, 5), (14, 3))
#: The first prompt of every trial exceeds sliding windows and chunks up to this size.
LONGEST_WINDOW = {"cpu": 128, "cuda": 8192}


def trial_tree(token: int, vocabulary: int) -> TokenTree:
    """A tree of eight rows that branches at two depths, so that a row's column is not its position.

    0 ─┬─ 1 ─┬─ 2 ── 3
       │     └─ 6 ── 7
       └─ 4 ── 5
    """
    ids = [(token * (i + 3) + 11 * i + 5) % vocabulary for i in range(9)]
    return _tree(ids, vocabulary, [0, 1, 2, 0, 4, 1, 6])


def _tree(ids: Sequence[int], vocabulary: int, parents: Sequence[int]) -> TokenTree:
    if vocabulary < 2:
        raise SettingsError("a model must have a vocabulary of at least two tokens, got one")
    tree = TokenTree(ids[0])
    for row, parent in enumerate(parents, 1):
        token = ids[row]
        while tree.child(parent, token) is not None:
            token = (token + 1) % vocabulary
        tree.add(token, parent, needs_logits=True)
    return tree


#: Rows of ``Trial.control_tree`` with a wrong ancestor and with a wrong position.
WRONG_ANCESTOR, WRONG_POSITION = (5, 7), (3,)
#: The path that a trial commits. Its last rows are neither adjacent to the first ones nor in place.
PATH = (0, 1, 6, 7)


class Trial:
    """Prompts and trees of one comparison.

    Each of two prompts is followed by two trees, with a commit after each; slot 0 then takes two single-row steps.
    Before the first trees, the control tree of slot 0 is evaluated.

    Args:
        facts: the model's facts.
        number: the trial's number; trials differ in tokens and prompt lengths.
        device: type of the model's device.

    Attributes:
        name: the name under which the reference logits are cached.
        controls: rows of the control tree, by kind of fault.
        tolerance: largest error in float32 and float64.
        repeats: how often each pass of trees is evaluated; the last time counts.
    """

    name = "trial"
    repeats = 1
    controls: tuple[tuple[int, ...], ...] = (WRONG_ANCESTOR, WRONG_POSITION)
    tolerance = 1e-3

    def __init__(self, facts: PassFacts, number: int, device: str) -> None:
        vocabulary = facts.vocabulary
        self.vocabulary = vocabulary
        generator = torch.Generator().manual_seed(number)
        first, second = PROMPT_LENGTHS[number]
        window = max(facts.kinds.sliding_window, facts.kinds.chunk)
        longest = min(LONGEST_WINDOW.get(device, 8192), facts.max_positions - 16, facts.rope_boundary - 16)
        if window <= longest:
            first = max(first, window + 2)
        low = min(3, vocabulary - 1)  # the first tokens of a vocabulary are often special
        self.prompts = [
            torch.randint(low, vocabulary, (n,), generator=generator).tolist() for n in (first, second)
        ]
        self.trees = [
            [trial_tree(13 + 4 * number + 2 * turn + b, vocabulary) for b in (0, 1)] for turn in (0, 1)
        ]
        self.singles = [(17 + number) % vocabulary, (29 + number) % vocabulary]

    def texts(self) -> list[list[int]]:
        """The token sequence up to and including each row, in the order of the rows of ``run``."""
        prefixes = [list(prompt) for prompt in self.prompts]
        texts = [list(prompt) for prompt in self.prompts]
        for trees in self.trees:
            for b, tree in enumerate(trees):
                texts += [prefixes[b] + tree.path_tokens(node) for node in range(len(tree))]
            prefixes = [
                prefix + [tree.tokens[n] for n in PATH] for prefix, tree in zip(prefixes, trees, strict=True)
            ]
        return texts + [prefixes[0] + self.singles[: i + 1] for i in range(len(self.singles))]

    def run(self, target: Target) -> tuple[torch.Tensor, torch.Tensor]:
        """Evaluate the trial on a fresh target.

        Both sequences share the pass of the first trees; each of the second trees has a separate pass.

        Returns:
            logits (rows, V) in the order of ``texts``, and the logits of slot 0's control tree, (8, V).
        """
        prompts = list(enumerate(self.prompts))
        rows = [scores.row(0).float().cpu() for scores in target.prefill(prompts)]
        control = _forward(target, [(0, self.control_tree())], self.repeats)
        first, second = (list(enumerate(trees)) for trees in self.trees)
        rows += _forward(target, first, self.repeats)
        target.commit([(slot, PATH) for slot, _ in prompts])
        rows += [row for pair in second for row in _forward(target, [pair], self.repeats)]
        target.commit([(slot, PATH) for slot, _ in prompts])
        for token in self.singles:
            rows += _forward(target, [(0, TokenTree(token))], self.repeats)
            target.commit([(0, [0])])
        for slot, _ in prompts:
            target.release(slot)
        return torch.stack(rows), torch.stack(control)

    def control_tree(self) -> TokenTree:
        """The negative control of slot 0's first tree: two rows have another parent at the same depth, and one row is
        off by one position."""
        tokens = self.trees[0][0].tokens
        # A small vocabulary has no third child, so the rows are made with other tokens first.
        wrong = _tree(range(len(tokens)), len(tokens), [0, 1, 2, 0, 1, 1, 2])
        wrong.tokens = list(tokens)
        wrong.depths[3] += 1
        return wrong

    def control_error(self, logits: torch.Tensor, reference: torch.Tensor, unit: torch.Tensor) -> float:
        """The error of the negative control, that is, of its weaker fault.

        Args:
            logits: logits of the control tree.
            reference, unit: reference logits and units of all rows; a row's error is divided by its unit.
        """
        first_tree = slice(len(self.prompts), len(self.prompts) + len(logits))
        errors = distance(logits, reference[first_tree]) / unit[first_tree]
        return min(float(errors[list(rows)].max()) for rows in self.controls)

    def reference(self, model: PreTrainedModel, in_two_passes: bool = False) -> torch.Tensor:
        """Logits (rows, V) from the model's own causal passes, without cache and mask. Shorter sequences are padded
        at the end, which causal attention does not see.

        Args:
            in_two_passes: use two passes instead of one, because other widths and batch sizes round differently.
        """
        texts = [tuple(text) for text in self.texts()]
        prefixes = {text[:end] for text in texts for end in range(len(text))}
        longest = sorted(set(texts) - prefixes, key=lambda text: (len(text), text))
        middle = len(longest) // 2
        rows: dict[tuple[int, ...], torch.Tensor] = {}
        for batch in [longest[:middle], longest[middle:]] if in_two_passes else [longest]:
            width = max(map(len, batch))
            ids = torch.tensor(
                [text + text[-1:] * (width - len(text)) for text in batch], device=model.device
            )
            with torch.no_grad():
                logits = model(input_ids=ids, use_cache=False, return_dict=True).logits
            for text in texts:
                for whole, of_whole in zip(batch, logits, strict=True):
                    if whole[: len(text)] == text:
                        rows[text] = of_whole[len(text) - 1].float().cpu()
        return torch.stack([rows[text] for text in texts])


class CapturedTrial(Trial):
    """A trial whose rows come from replays, because the second pass of each size is captured and the third one
    replays it. In the pass of both sequences, the trees have 8 and 9 rows, so both are padded."""

    name = "trial of replays"
    repeats = 3

    def __init__(self, facts: PassFacts, number: int, device: str) -> None:
        super().__init__(facts, number, device)
        for _, tree in self.trees:
            token = next(t for t in range(self.vocabulary) if tree.child(3, t) is None)
            tree.add(token, 3, needs_logits=True)


def _forward(target: Target, trees: list[tuple[int, TokenTree]], repeats: int = 1) -> list[torch.Tensor]:
    slots, given = zip(*trees, strict=True)
    for _ in range(repeats - 1):  # swap the trees, so that the last time has other slots and lengths
        target.forward(list(zip(slots, given[::-1], strict=True)))
    rows = []
    for scores, (_, tree) in zip(target.forward(trees), trees, strict=True):
        rows += [scores.row(node).float().cpu() for node in tree.needs_logits_nodes()]
    return rows


def bit_equal_rows(target: Target) -> tuple[int, int]:
    """Compare the rows of a tree, bit for bit, with single-row steps over the same tokens.

    Args:
        target: any target whose slot 0 is free.

    Returns:
        (number of equal rows, number of rows).
    """
    generator = torch.Generator().manual_seed(0)
    prompt = torch.randint(
        min(3, target.vocabulary - 1), target.vocabulary, (40,), generator=generator
    ).tolist()
    target.prefill([(0, prompt)])
    tree = (
        trial_tree(13, target.vocabulary) if target.depth_limit(0) >= 3 else TokenTree(13 % target.vocabulary)
    )
    rows = _forward(target, [(0, tree)])
    equal = 0
    target.release(0)
    for node, row in enumerate(rows):
        target.prefill([(0, prompt)])
        for token in tree.path_tokens(node):
            (single,) = _forward(target, [(0, TokenTree(token))])
            target.commit([(0, [0])])
        target.release(0)
        equal += torch.equal(row, single)
    return equal, len(rows)


# ------------------------------------------------------------------------------------------ the comparison


def compare(
    model: PreTrainedModel,
    facts: PassFacts,
    make_target: Callable[[], Target],
    widened: bool = False,
    kind: type[Trial] = Trial,
) -> Equivalence:
    """Compare a path with the model's own causal passes.

    Args:
        make_target: makes a fresh target of the path; called once per trial.
        widened: whether the model runs inside ``in_float32`` and is judged as float32.
        kind: the class of the trials.

    Raises:
        OutOfMemory: a pass did not fit in memory. Other errors of the path are not caught.
    """
    half = model.dtype in HALF_DTYPES and not widened
    limit = MAX_ROW_FACTOR if half else kind.tolerance
    for number in range(len(PROMPT_LENGTHS)):
        # The reference, computed once per model and trial.
        trial = kind(facts, number, model.device.type)
        name = f"{kind.name} {number}{' widened' if widened else ''}"
        with mask_compatible_attention(model):
            reference, own_errors, noise = remember(model, name, partial(_reference, model, trial, half))
        unit = torch.maximum(own_errors, own_errors.median())  # a row may be accurate by chance
        # The errors of the path's rows, and of the negative control.
        logits, control_logits = trial.run(make_target())
        absolute = distance(logits, reference)
        errors = absolute / unit
        control = trial.control_error(control_logits, reference, unit)
        root_mean_square = errors.square().mean().sqrt()
        geometric_mean = (absolute / own_errors).clamp(min=0.1).log().mean().exp()
        difference = float(errors.max())
        mean = float(max(root_mean_square, geometric_mean))
        # The criteria; the means apply only in 16 bits.
        stands_out = control >= CONTROL_MARGIN * difference
        ok = difference <= limit and stands_out and (mean <= MAX_MEAN_FACTOR or not half)
        if ok:
            break
    # The figures of the last trial, as a phrase.
    reason = f"difference {difference:.2g}, {limit:g} allowed"
    if half:
        dtype = str(model.dtype).removeprefix("torch.")
        reason = (
            f"difference {difference:.2g} times the model's own error of {noise:.1e} in {dtype}, {limit:g} allowed, "
            f"{mean:.2g} over all rows, {MAX_MEAN_FACTOR:g} allowed"
        )
    reason += f"; a wrong ancestor or position shows as {control:.2g}"
    return Equivalence(ok, difference, control, limit, noise, reason)


def _reference(model: PreTrainedModel, trial: Trial, half: bool) -> tuple[torch.Tensor, torch.Tensor, float]:
    """A trial's reference logits (rows, V), the model's own error per row (rows,), and ``Equivalence.noise``."""
    own = trial.reference(model)
    if not half:
        return own, torch.ones(len(own), dtype=torch.float64), 0.0
    other = trial.reference(model, in_two_passes=True)
    try:
        with in_float32(model):
            exact = trial.reference(model)
        errors = torch.maximum(distance(own, exact), distance(other, exact))
    except (RuntimeError, TypeError, ValueError, NotImplementedError):
        # The weights cannot be widened, for example because they are quantized. Estimate the error by two
        # evaluations.
        exact = own
        errors = 2 * distance(other, own)
        errors = errors.new_full(errors.shape, float(errors.max()))
    noise = float(errors.square().mean().sqrt())
    return exact, errors.clamp(min=max(1e-6, 0.1 * float(errors.median()))), noise


def distance(rows: torch.Tensor, reference: torch.Tensor) -> torch.Tensor:
    """e(x, r) of each row, (rows,) float64; infinite for a row with NaN. Both arguments are (rows, V)."""
    difference, size = (rows - reference).double(), reference.double()
    difference, size = (x - x.mean(dim=-1, keepdim=True) for x in (difference, size))
    errors: torch.Tensor = difference.norm(dim=-1) / size.norm(dim=-1).clamp(min=1e-30)
    return errors.nan_to_num(nan=torch.inf)


def differ(equivalence: Equivalence | None, ours: torch.Tensor, theirs: torch.Tensor) -> str:
    """Whether two evaluations of one row of logits, (V,) each, differ by more than rounding.

    Each may be as far from float32 as ``compare`` allows, so they may be twice as far from each other.

    Args:
        equivalence: the result of ``compare`` for the model; None applies the limit of float32.

    Returns:
        "" if the difference is within the limit, else a phrase with both figures.
    """
    noise = equivalence.noise if equivalence is not None else 0.0
    limit = 2 * max(Trial.tolerance, MAX_ROW_FACTOR * noise)
    error = float(distance(theirs.to(ours), ours.double()))
    return "" if error <= limit else f"relative distance {error:.2g}, {limit:.2g} is allowed"


@contextmanager
def in_float32(model: nn.Module) -> Iterator[None]:
    """Evaluate a 16-bit model in float32 with its own weights, without a second copy. One thread at a time.

    Each module's weights are widened for the duration of its call. Embeddings look up rows in their own dtype and
    widen the result.
    """
    saved: list[tuple[nn.Module, dict[str, nn.Parameter | None]]] = []
    # The caller may run the model in another thread, whose calls must not restore these weights.
    thread = get_ident()

    def widen(module: nn.Module, args: tuple[Any, ...], named: dict[str, Any]) -> Any:
        if get_ident() != thread:
            return None
        saved.append((module, dict(module._parameters)))
        for name, weight in saved[-1][1].items():
            if weight is not None and weight.dtype in HALF_DTYPES:
                module._parameters[name] = nn.Parameter(weight.float(), requires_grad=False)
        return tuple(map(_float, args)), {name: _float(value) for name, value in named.items()}

    def restore(module: nn.Module, args: Any, output: Any) -> None:
        # Modules return in the reverse order of their calls.
        if get_ident() == thread:
            module._parameters.update(saved.pop()[1])

    with ExitStack() as hooks:
        # If a call raises, some modules are still widened; restore them after all hooks are removed, outermost last.
        hooks.callback(lambda: [module._parameters.update(weights) for module, weights in reversed(saved)])
        for module in model.modules():
            if isinstance(module, nn.Embedding):
                hooks.enter_context(module.register_forward_hook(lambda module, args, output: _float(output)))
            elif any(weight is not None for weight in module._parameters.values()):
                hooks.enter_context(module.register_forward_pre_hook(widen, with_kwargs=True))
                hooks.enter_context(module.register_forward_hook(restore))
        yield


def _float(value: Any) -> Any:
    return value.float() if torch.is_tensor(value) and value.dtype in HALF_DTYPES else value
