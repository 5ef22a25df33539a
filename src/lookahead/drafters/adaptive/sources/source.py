"""What a source of guesses is: ``Source``, and how compiled code calls all sources.

Compiled functions are known when code is compiled, so no list is read while a tree grows: ``chain`` makes one
function that calls the sources' functions one after the other.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from ....core import Noise
from ....machine_code import compiled
from ..calibration import count
from ..layout import MATCHES, index_of
from ..settings import AdaptiveSettings


@dataclass(frozen=True)
class Setup:
    """What a source gets at the start of a sequence.

    Attributes:
        number: the source's place in ``sources.SOURCES``.
        config: the drafter's settings.
        state: the ``AdaptiveState``, which sequences may share.
        vocabulary: V.
        tables: the part of it for greedy or for sampled decoding, including all buckets by name.
        noise: the noise with which tokens are sampled; None for greedy decoding.
        keeps: whether the state is kept after this sequence.
        head, table: the light head and the base table; None for none.
    """

    number: int
    config: AdaptiveSettings
    state: Any
    vocabulary: int
    tables: Any
    noise: Noise | None = None
    keeps: bool = False
    head: Any = None
    table: Any = None

    @property
    def sampled(self) -> bool:
        """Whether tokens are sampled."""
        return self.noise is not None


class Source:
    """One source of guesses, for one sequence. Its file is the only one that knows it, besides ``sources.SOURCES``.

    Class attributes, of which the functions are compiled, or None for nothing to do. ``own`` is ``arrays``, and
    ``number`` the source's place in ``sources.SOURCES``:

        propose(memory, own, node, number)                propose tokens under a row
        refine(memory, own, node, number)                 change the proposals of all sources under a row
        wants(memory, own, node) -> bool                  whether ``serve`` must be called for a row
        judge(memory, own, node, number, right, truth)    count hits and trials of the proposals under an accepted
                                                          row; ``right`` is the index of the target's token, or -1
        learn(memory, own, ids, odds, length)             learn from the logits of a step
        feed(memory, own, length)                         ``memory.tokens[:length]`` continue the sequence

    Attributes:
        name: as in ``Adaptive(sources=...)``.
        Arrays: the type of ``arrays``, a named tuple as ``machine_code.pack`` takes it.
        most: the largest number of tokens proposed under a row.
        on: whether the sequence uses the source; if not, its functions are not called.
        arrays: the arrays for compiled code; another object once an array has been replaced by a larger one.
    """

    name: ClassVar[str]
    Arrays: ClassVar[type]
    propose: ClassVar[Callable[..., None] | None] = None
    refine: ClassVar[Callable[..., None] | None] = None
    wants: ClassVar[Callable[..., bool] | None] = None
    judge: ClassVar[Callable[..., None] | None] = None
    learn: ClassVar[Callable[..., None] | None] = None
    feed: ClassVar[Callable[..., None] | None] = None
    most: int
    on: bool
    arrays: Any

    def __init__(self, setup: Setup) -> None:
        """Start a sequence."""
        self.number = setup.number
        self.on = self.name in setup.config.sources

    @staticmethod
    def buckets(fits: Mapping[str, Any], sampled: bool) -> dict[str, Any]:
        """The source's buckets by name, with priors and no trials (``calibration.new_buckets``).

        Args:
            fits: the fitted log-odds of each axis, by name (``scripts/fit_priors.py``).
            sampled: whether tokens are sampled.
        """
        return {}

    def read(self, tokens: Any) -> None:
        """Append many tokens, int64 (n,), to the sequence."""

    def reserve(self, rows: int, tokens: int) -> bool:
        """Make room for a step's rows and for new tokens. Returns whether what a drafted tree refers to is gone."""
        return False

    def catch_up(self) -> bool:
        """Notice what other sequences have changed. Returns as ``reserve``."""
        return False

    def restart(self, memory: Any) -> None:
        """Let the drafted tree refer to nothing that is gone."""

    def interrupt(self) -> None:
        """The sequence goes on without a step of the tree."""

    def begin(self, rate: float, hidden: Any) -> None:
        """A new tree grows.

        Args:
            rate: as in ``rows``.
            hidden: the hidden state under which the last token was emitted, (hidden,) fp32; None if unknown.
        """

    def serve(self, memory: Any) -> float:
        """Do what compiled code cannot, under the row ``step.wanted``. Returns its cost in plain steps."""
        return 0.0

    def figures(self) -> dict[str, float]:
        """Statistics of the source, by name."""
        return {}

    def proposed(self, memory: Any, node: int) -> list[int]:
        """The tokens that the source proposed under a row of the last tree, for traces."""
        return []


class TextSource(Source):
    """A source that proposes up to ``MATCHES`` tokens under a row, each with a bucket, in ``Tree.matches``.

    Of all text sources that propose a token, the one with the highest confidence selects the joint bucket.
    """

    most = MATCHES

    def proposed(self, memory: Any, node: int) -> list[int]:
        found: list[int] = memory.tree.matches["token"][self.number, node].tolist()
        return found[: found.index(-1)] if -1 in found else found


@compiled
def judge_matches(memory: Any, buckets: Any, node: int, number: int, truth: int) -> None:
    """Count hits and trials of a text source's proposals."""
    matches = memory.tree.matches[number, node]
    right = index_of(matches, MATCHES, truth)
    for index in range(MATCHES):
        if matches[index].token < 0:
            break
        count(buckets[matches[index].bucket], index == right)


def chain(sources: Sequence[type[Source]], name: str) -> Any:
    """A compiled function that calls the functions with this name of all sources that are on, in order.

    Its arguments are those of the functions, without ``own`` and ``number``.
    """
    link, call = LINKS[name]
    for number in reversed(range(len(sources))):
        function = getattr(sources[number], name)
        if function is not None:
            call = compiled(link(function, number, call), f".{name}.{number}")
    return call


def _node(function: Any, number: int, rest: Any) -> Any:
    def call(memory: Any, node: int) -> None:
        if memory.on[number]:
            function(memory, memory.sources[number], node, number)
        rest(memory, node)

    return call


def _judge(function: Any, number: int, rest: Any) -> Any:
    def call(memory: Any, node: int, right: int, truth: int) -> None:
        if memory.on[number]:
            function(memory, memory.sources[number], node, number, right, truth)
        rest(memory, node, right, truth)

    return call


def _learn(function: Any, number: int, rest: Any) -> Any:
    def call(memory: Any, ids: Any, odds: Any, length: int) -> None:
        if memory.on[number]:
            function(memory, memory.sources[number], ids, odds, length)
        rest(memory, ids, odds, length)

    return call


def _feed(function: Any, number: int, rest: Any) -> Any:
    def call(memory: Any, length: int) -> None:
        if memory.on[number]:
            function(memory, memory.sources[number], length)
        rest(memory, length)

    return call


def _wants(function: Any, number: int, rest: Any) -> Any:
    def call(memory: Any, node: int) -> Any:
        if memory.on[number] and function(memory, memory.sources[number], node):
            return number
        return rest(memory, node)

    return call


@compiled
def _no_node(memory: Any, node: int) -> None:
    """The end of a chain."""


@compiled
def _no_judge(memory: Any, node: int, right: int, truth: int) -> None:
    """The end of a chain."""


@compiled
def _no_learn(memory: Any, ids: Any, odds: Any, length: int) -> None:
    """The end of a chain."""


@compiled
def _no_feed(memory: Any, length: int) -> None:
    """The end of a chain."""


@compiled
def _no_wants(memory: Any, node: int) -> int:
    """The end of a chain."""
    return -1


#: A compiled function's name -> (makes a function that calls it and then the rest of the chain, the chain's end).
LINKS: dict[str, tuple[Any, Any]] = {
    "propose": (_node, _no_node),
    "refine": (_node, _no_node),
    "wants": (_wants, _no_wants),
    "judge": (_judge, _no_judge),
    "learn": (_learn, _no_learn),
    "feed": (_feed, _no_feed),
}
