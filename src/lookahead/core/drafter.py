"""The interface of drafting methods. A drafter is a set of settings; it starts one drafting state per sequence.

    drafter = Lookahead(window_size=15, ngram_size=5, guess_set_size=15)     frozen settings; any number of sequences
    state = drafter.start(Start(prompt, first, eos))                         the drafting state of one sequence
    tree = state.draft(max_depth, max_rows, batch)                           the rows of the next step
    state.observe(tree, scores, path, tokens)                                learn from the step's result

A new method is one subclass of ``Drafter`` and one of ``DraftState``.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Protocol

from .target import Scores, Target
from .tree import TokenTree

UNLIMITED_ROWS = 1 << 20
#: Number of final prompt tokens copied in front of predicted tokens, so that the first of them have a context.
PREDICTION_CONTEXT = 16


class Noise(Protocol):
    """Noise that can be computed in advance (Gumbel-max): token = argmax(logits / temperature + noise(index))."""

    temperature: float
    #: The position of index 0 in the sequence; read only if there is a ``key``.
    start: int

    @property
    def key(self) -> int | None:
        """The key with which ``draws.gumbel_of`` computes the noise of one token; None if only ``__call__`` can."""
        ...

    def __call__(self, index: int) -> Any:
        """Gumbel noise (V,) of emitted token ``index``, as a numpy array; the prefill emits token 0.

        A pure function of ``index``, which may be a token of the last step or a later one.
        """
        ...


@dataclass(frozen=True, slots=True)
class Start:
    """The inputs of a drafter when drafting starts, right after the prefill.

    Attributes:
        prompt: token ids, at least one.
        first: the token that the prefill emitted.
        eos: tokens that end a sequence.
        vocabulary: V; 0 if unknown.
        noise: the noise with which the sequence is sampled; None for greedy decoding. A drafter may rank candidates
            with it; the output does not depend on that.
        predicted: tokens that the caller expects to follow the prompt; empty for none.
    """

    prompt: Sequence[int]
    first: int
    eos: frozenset[int] = frozenset()
    vocabulary: int = 0
    noise: Noise | None = None
    predicted: Sequence[int] = ()

    @property
    def text(self) -> list[int]:
        """The tokens to learn n-grams from: the predicted tokens, the prompt and the first token.

        If there are predicted tokens, the prompt's last ``PREDICTION_CONTEXT`` tokens are copied in front of them.
        """
        prompt = list(self.prompt)
        before = [*prompt[-PREDICTION_CONTEXT:], *self.predicted] if self.predicted else []
        return [*before, *prompt, self.first]


class DraftState(ABC):
    """The drafting state of one sequence. ``Drafter.start`` makes it; nothing else needs to be set."""

    @abstractmethod
    def draft(self, max_depth: int, max_rows: int = UNLIMITED_ROWS, batch: int = 1) -> TokenTree:
        """The tree of the next step.

        If a step does not fit in memory, the engine calls this again with fewer rows. The second call must not depend
        on the first.

        Args:
            max_depth: largest depth of a node, at least 0.
            max_rows: largest number of rows, at least 1.
            batch: number of sequences in the next forward pass.
        """

    @abstractmethod
    def observe(self, tree: TokenTree, scores: Scores, path: Sequence[int], tokens: Sequence[int]) -> None:
        """Learn from a step.

        Args:
            tree: the drafted tree.
            scores: the logits of its rows.
            path: the accepted rows, root first.
            tokens: the emitted tokens.
        """

    def overlap(self, tree: TokenTree) -> None:  # noqa: B027
        """Called between the launch of a step and the first read of its logits.

        On an asynchronous device (CUDA) the pass is still running, so work that does not need its result takes no
        extra time here. ``observe`` follows for the same tree, unless the sequence fails or the step is repeated.
        """

    def stats(self) -> dict[str, float]:
        """Statistics of this method, by name."""
        return {}

    def trace(self, tree: TokenTree | None) -> dict[str, Any]:
        """This method's part of the last step's trace (docs/trace.md), as JSON values. Called after ``observe``.

        Args:
            tree: the step's tree; None right after the start, when only the prompt has been read.
        """
        return {}


class Drafter(ABC):
    """The settings of a drafting method. Subclasses are frozen dataclasses.

    One object serves any number of sequences. State that sequences share (an n-gram pool, a warm state) is also a
    field, but is ignored when drafters are compared.

    Attributes:
        name: the method's name, as in ``drafter="lookahead"``.
    """

    name: ClassVar[str] = ""

    @property
    def uses_prediction(self) -> bool:
        """Whether ``start`` reads ``Start.predicted``."""
        return False

    @abstractmethod
    def start(self, sequence: Start) -> DraftState:
        """The state of a new sequence."""

    @property
    def max_step_rows(self) -> int | None:
        """The number of rows in the largest step; None if the method adapts to any row limit."""
        return None

    def keep(self, prompt: Sequence[int], tokens: Sequence[int]) -> None:  # noqa: B027
        """Called when a sequence has ended without an error, for methods that learn from one request for others.

        Args:
            prompt: token ids of the prompt.
            tokens: the emitted tokens.
        """

    def expect(self, tokenizer: Any) -> None:  # noqa: B027
        """Called when a model with this tokenizer is loaded, for methods that can prepare before the first text.

        A GGUF file's tokenizer is read before its weights, that of other models after them.

        Raises:
            SettingsError: the settings do not fit the tokenizer.
        """

    def prepare(self, model: Any, target: Target) -> Drafter:
        """The drafter for sequences of one model, with what it has to load for that model.

        Called when a sequence leaves the queue, so later calls for one model must be cheap. Most methods need nothing
        and return themselves.

        Args:
            model: a ``lookahead.model.Model``.
            target: the target that will evaluate the sequence; other sequences may use it.
        """
        return self
