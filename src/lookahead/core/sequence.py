"""The records of a sequence: a ``Request`` enters the engine, a ``Sequence`` is decoded, each step is an ``Update``.

The last update of a sequence contains its ``Result``. All callers of the engine, from the command line to the server,
use these records.
"""

from __future__ import annotations

from collections import abc
from dataclasses import dataclass, field
from time import monotonic
from traceback import clear_frames
from typing import Any, Protocol

from .drafter import Drafter, DraftState, Noise, Start
from .errors import LookaheadError, SettingsError, failure
from .stats import Stats
from .target import Scores
from .tree import TokenTree
from .verify import Choose, as_choose, greedy


class Detokenizer(Protocol):
    """Converts the tokens of one sequence to text and finds stop strings; ``text.decoder.TextDecoder`` is one.

    Attributes:
        stops: strings that end the text and are not part of it.
        text: all text returned by ``drain``.
        stopped: the stop string that ended the text, or None.
    """

    stops: abc.Sequence[str]
    text: str
    stopped: str | None

    def push(self, *tokens: int) -> bool:
        """Append tokens, or a single one if there are stop strings. Returns whether a stop string is complete."""
        ...

    def finish(self) -> None:
        """End the text."""
        ...

    def drain(self) -> str:
        """The text that became safe to show since the last call."""
        ...


@dataclass(slots=True)
class Request:
    """One sequence to decode.

    Attributes:
        prompt: token ids, at least one.
        drafter: the settings of the method; the engine starts a drafting state from them.
        max_new_tokens: at least 1.
        choose: returns the target's token under a row; a ``Choose`` or a plain function; greedy by default.
        eos: tokens that end the sequence; such a token is emitted.
        finished: called with each emitted token; if it returns a string, the sequence ends with that finish reason.
        read_prompt: called with (scores, node, token) for every prompt token except the first; ``scores`` at ``node``
            predict ``token``.
        noise, predicted: passed to the drafter; see ``core.drafter.Start``.
        detokenizer: turns the emitted tokens into text; None for token ids only.
        seed: the sampling seed, copied to the result; None for greedy decoding.
        tag: any value of the caller's. ``LLM.run`` numbers its prompts with it.
    """

    prompt: abc.Sequence[int]
    drafter: Drafter
    max_new_tokens: int
    choose: Choose | abc.Callable[[Scores, int], int] = greedy
    eos: frozenset[int] = frozenset()
    finished: abc.Callable[[int], str | None] | None = None
    read_prompt: abc.Callable[[Scores, int, int], None] | None = None
    noise: Noise | None = None
    predicted: abc.Sequence[int] = ()
    detokenizer: Detokenizer | None = None
    seed: int | None = None
    tag: Any = None

    def __post_init__(self) -> None:
        if not isinstance(self.drafter, Drafter):
            raise SettingsError(
                f"drafter must be a Drafter, such as lookahead.Adaptive(), got {self.drafter!r:.80}"
            )
        if not self.prompt:
            raise SettingsError("the prompt must have at least one token, got none")
        if self.max_new_tokens < 1:
            raise SettingsError(f"max_new_tokens must be at least 1, got {self.max_new_tokens}")


@dataclass(slots=True)
class Result:
    """One finished sequence.

    Attributes:
        text: the completion without stop strings and special tokens; "" without a tokenizer.
        tokens: the emitted token ids, including an end token or the tokens of a stop string.
        finish_reason: "stop" (end token or stop string), "length", "cancelled" or "error".
        stats: steps, rows, tokens per step, seconds by phase; see ``lookahead.core.Stats``.
        prompt_tokens: token ids of the prompt.
        seed: the seed that reproduces these tokens; None for greedy decoding.
        stopped: the stop string that ended the text, or None.
        error: the error that ended the sequence, if ``finish_reason`` is "error".
    """

    text: str
    tokens: list[int]
    finish_reason: str
    stats: Stats
    prompt_tokens: list[int] = field(repr=False)
    seed: int | None = None
    stopped: str | None = None
    error: LookaheadError | None = None

    def checked(self) -> Result:
        """Return this result, or raise the error that ended the sequence."""
        if self.error is not None:
            raise self.error
        return self

    @property
    def seconds(self) -> float:
        """Wall-clock time of all phases."""
        return sum(self.stats.seconds.values())


@dataclass(slots=True, eq=False)
class Sequence:
    """A request in an engine; ``Engine.add`` returns it.

    ``finish_reason`` is None until the sequence ends, then "stop" (an end token or a stop string), a reason that
    ``Request.finished`` returned, "length", "cancelled", or "error" with ``error`` set. Tokens emitted before an
    error are kept, and are part of an update.

    Attributes:
        request: the request, as the engine admitted it.
        slot: the target's slot; -1 while the sequence waits.
        evaluated: tokens of the prompt that are in the cache.
        cached: how many of those reuse the keys and values of an earlier sequence.
        tokens: the emitted token ids.
        reported: how many of them were part of an update.
        stats: statistics so far.
        choose: the request's ``choose`` as an object.
        drafting: the drafter's state; None until the prefill is done.
        added, first_token: ``time.monotonic()`` when the sequence was added and when its first token was emitted.
        result: set by the last update.
    """

    request: Request
    slot: int = -1
    evaluated: int = 0
    cached: int = 0
    tokens: list[int] = field(default_factory=list)
    reported: int = 0
    finish_reason: str | None = None
    error: LookaheadError | None = None
    stats: Stats = field(default_factory=Stats)
    choose: Choose = field(init=False, repr=False)
    drafting: DraftState | None = field(default=None, repr=False)
    added: float = field(default_factory=monotonic)
    first_token: float | None = None
    result: Result | None = None

    def __post_init__(self) -> None:
        self.choose = as_choose(self.request.choose)
        self.stats.prompt_tokens = len(self.request.prompt)

    @property
    def most_tokens(self) -> int:
        """The largest number of tokens, prompt included."""
        return len(self.request.prompt) + self.request.max_new_tokens

    @property
    def fresh(self) -> list[int]:
        """The emitted tokens that were not part of an update yet."""
        return self.tokens[self.reported :]

    def emit(self, token: int) -> bool:
        """Append the next token. Returns whether it ends the sequence."""
        request = self.request
        text = self.request.detokenizer
        self.tokens.append(token)
        self.stats.new_tokens += 1
        # Stop strings need the text now; otherwise ``read`` decodes it after the step.
        stopped = text is not None and text.stops and self._push(text, token)
        reason = request.finished(token) if request.finished is not None else None
        if reason is None and stopped:
            reason = "stop"
        if reason is None and token in request.eos:
            reason = "stop"
        if reason is None and len(self.tokens) >= request.max_new_tokens:
            reason = "length"
        self.finish_reason = reason
        return reason is not None

    def start_drafting(self, vocabulary: int) -> None:
        """Start the drafter's state, after the prefill has emitted the first token."""
        request = self.request
        self.drafting = request.drafter.start(
            Start(
                request.prompt,
                self.tokens[0],
                request.eos,
                vocabulary,
                request.noise,
                request.predicted,
            )
        )

    def read(self, tokens: abc.Sequence[int]) -> str:
        """The text that became safe to show with these tokens of a step; all remaining text at the sequence's end."""
        text = self.request.detokenizer
        if text is None:
            return ""
        if tokens and not text.stops:
            self._push(text, *tokens)
        if self.finish_reason is not None:
            text.finish()
        return text.drain()

    @staticmethod
    def _push(text: Detokenizer, *tokens: int) -> bool:
        try:
            return text.push(*tokens)
        except Exception as error:
            raise failure("detokenization", error) from error

    def fail(self, error: LookaheadError) -> None:
        """End the sequence with an error. The first error stays.

        The frames of the error's traceback are cleared, because those of a failed pass hold its tensors.
        """
        self.finish_reason = "error"
        self.error = self.error or error
        cause: BaseException | None = error
        seen = set[int]()
        while cause is not None and id(cause) not in seen:  # an exception may be its own cause
            seen.add(id(cause))
            clear_frames(cause.__traceback__)
            cause = cause.__cause__

    def close(self) -> Result:
        """Set and return the result of a sequence that has ended."""
        assert self.finish_reason is not None
        text = self.request.detokenizer
        self.result = Result(
            text.text if text is not None else "",
            self.tokens,
            self.finish_reason,
            self.stats,
            list(self.request.prompt),
            self.request.seed,
            text.stopped if text is not None else None,
            self.error,
        )
        return self.result


@dataclass(frozen=True, slots=True)
class Update:
    """The outcome of one step for one sequence.

    Attributes:
        sequence: the sequence.
        tokens: the token ids that the step emitted, even if an error followed; [] if the sequence ended without a
            step.
        piece: text that became safe to show, possibly "".
        path: the accepted rows of the tree, root first; [] without a tree.
        tree: the rows that were evaluated; None for the prefill and for an end without a step.
        result: set in the last update of a sequence.
    """

    sequence: Sequence
    tokens: list[int] = field(default_factory=list)
    piece: str = ""
    path: list[int] = field(default_factory=list)
    tree: TokenTree | None = None
    result: Result | None = None

    @property
    def rows(self) -> int:
        """Rows evaluated, 0 for the prefill."""
        return len(self.tree) if self.tree is not None else 0

    @property
    def index(self) -> int:
        """The index of the prompt in the list given to ``LLM.run``."""
        return int(self.sequence.request.tag)
