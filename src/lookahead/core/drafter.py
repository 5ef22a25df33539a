"""The interface of drafting methods: a drafter holds settings and starts the state of each sequence.

    drafter = Lookahead(window_size=15, ngram_size=5, guess_set_size=15)     frozen settings; any number of sequences
    state = drafter.start(Start(prompt, first, eos))                         the state of one sequence
    tree = state.draft(max_depth, max_rows, batch)                           the rows of the next step
    state.observe(tree, scores, path, tokens)                                learn from the result

A new method is one subclass of ``Drafter`` and one of ``DraftState``.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Protocol

from .target import Scores
from .tree import TokenTree

UNLIMITED_ROWS = 1 << 20
#: Number of the prompt's last tokens that are put before a predicted text, so that its first tokens have a context.
PREDICTION_CONTEXT = 16


class Noise(Protocol):
    """Sampling with noise known in advance (Gumbel-max): token = argmax(logits / temperature + noise(index))."""

    temperature: float
    #: The position of index 0 in the text.
    start: int
    #: From it ``draws.gumbel_of`` computes the noise of a single token; None if only whole arrays are known.
    key: int | None

    def __call__(self, index: int) -> Any:
        """Gumbel noise (V,) of emitted token ``index``, a numpy array; the prefill emits token 0.

        A pure function of ``index``. It may be called for tokens of the last step and for later tokens.
        """
        ...


@dataclass(frozen=True, slots=True)
class Start:
    """What a drafter knows about a sequence when drafting starts, right after the prefill.

    Attributes:
        prompt: token ids, at least one.
        first: the token that the prefill emitted.
        eos: tokens that end a text.
        vocabulary: V; 0 if unknown.
        noise: how the sequence is sampled; None for greedy decoding. A drafter may use it to rank candidates;
            the output does not depend on whether it does.
        predicted: tokens that, according to the caller, are likely to follow the prompt; empty for none.
        cost_curve: what steps of this model cost on this machine (``drafters.adaptive.cost.CostCurve``), for drafters
            that choose the rows of a step by their cost; None if nothing was measured.
        head: a light head of this model (``drafters.adaptive.sources.light_head``); None for none.
        base_table: what follows in the model's own text (``drafters.adaptive.sources.base_table.BaseTable``), for
            drafters that read it; None for none.
    """

    prompt: Sequence[int]
    first: int
    eos: frozenset[int] = frozenset()
    vocabulary: int = 0
    noise: Noise | None = None
    predicted: Sequence[int] = ()
    cost_curve: Any = None
    head: Any = None
    base_table: Any = None

    @property
    def text(self) -> list[int]:
        """The tokens to learn n-grams from: the prompt and the first token, after the predicted text.

        A copy of the prompt's last tokens stands before the predicted text, so that its first tokens have a context.
        """
        prompt = list(self.prompt)
        before = [*prompt[-PREDICTION_CONTEXT:], *self.predicted] if self.predicted else []
        return [*before, *prompt, self.first]


class DraftState(ABC):
    """The drafting state of one sequence. ``Drafter.start`` makes it; nothing else needs to be set."""

    @abstractmethod
    def draft(self, max_depth: int, max_rows: int = UNLIMITED_ROWS, batch: int = 1) -> TokenTree:
        """The tree of the next step.

        If a step does not fit in memory, the loop calls this again with fewer rows. The second call must not depend
        on the first.

        Args:
            max_depth: largest depth of a node, at least 0.
            max_rows: largest number of rows, at least 1.
            batch: sequences in the next forward pass.
        """

    @abstractmethod
    def observe(self, tree: TokenTree, scores: Scores, path: Sequence[int], tokens: Sequence[int]) -> None:
        """Learn from a step: the drafted tree, the logits of its rows, the accepted path, the emitted tokens."""

    def overlap(self, tree: TokenTree) -> None:  # noqa: B027
        """Called between the launch of a step and the first read of its logits.

        An asynchronous device (CUDA) is still computing, so work that does not need the step's result is free here.
        ``observe`` follows for the same tree, unless the sequence ends with the step.
        """

    def stats(self) -> dict[str, float]:
        """Statistics of this method, by name."""
        return {}

    def trace(self, tree: TokenTree | None) -> dict[str, Any]:
        """What a trace shows of the last step besides its tree (docs/trace.md), as JSON. Called after ``observe``.

        Args:
            tree: the step's tree; None right after the start, when the prompt has been read.
        """
        return {}


class Drafter(ABC):
    """The settings of a drafting method. Subclasses are frozen dataclasses.

    One object serves any number of sequences. State that is shared by sequences (an n-gram pool, a warm state) is a
    field too; such fields are ignored when two drafters are compared.

    Attributes:
        name: the method's name, as in ``drafter="lookahead"``.
        uses_prediction: whether ``start`` reads ``Start.predicted``.
    """

    name: ClassVar[str] = ""
    uses_prediction: ClassVar[bool] = False

    @abstractmethod
    def start(self, sequence: Start) -> DraftState:
        """The state of a new sequence."""

    @property
    def max_step_rows(self) -> int | None:
        """Rows of the largest step under these settings; None if the method adapts to any row limit."""
        return None

    @property
    def needs_base_table(self) -> bool:
        """Whether ``start`` uses ``Start.base_table``. The caller then looks for the model's table."""
        return False

    @property
    def needs_cost_curve(self) -> bool:
        """Whether ``start`` uses ``Start.cost_curve``. The caller then measures it first."""
        return False

    @property
    def wanted_head(self) -> str | None:
        """The path of the light head that ``start`` uses, or "auto"; the caller loads it first. None for none."""
        return None
