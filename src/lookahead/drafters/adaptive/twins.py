"""Which of two twins runs: pure Python, or code that numba compiles. Both draft the same trees.

Numba is imported only when somebody asks for a part of the compiled twin.
"""

from __future__ import annotations

from functools import cache
from typing import Any

from ...core import SettingsError
from .config import SOURCES, AdaptiveConfig
from .grow import Grower
from .suffix import SuffixTrie
from .tables import Tables


@cache
def why_not_compiled() -> str:
    """Why the compiled twin cannot run here; empty where it can."""
    try:
        from .compiled import entries  # noqa: F401
    except ImportError:
        return "numba is not installed (pip install numba)"
    except RuntimeError as error:  # numba found no folder to keep compiled code in
        return f"numba: {str(error).splitlines()[0]}"
    return ""


class Twins:
    """The parts of one twin.

    Args:
        compiled: which; None takes the compiled one where it can run.

    Raises:
        SettingsError: the compiled one was asked for and cannot run.
    """

    def __init__(self, compiled: bool | None = None) -> None:
        if compiled and why_not_compiled():
            raise SettingsError(f"the compiled drafter needs numba: {why_not_compiled()}; or leave it out")
        self.compiled = not why_not_compiled() if compiled is None else compiled

    def tables(self, config: AdaptiveConfig, sampled: bool) -> Any:
        """Logit cache and calibrations."""
        if not self.compiled:
            return Tables(config, sampled)
        from .arrays import ArrayTables

        return ArrayTables(config, sampled)

    def trie(self, order: int, max_nodes: int | None = None) -> Any:
        """A suffix trie."""
        if not self.compiled:
            return SuffixTrie(order, max_nodes)
        from .arrays import ArrayTrie

        return ArrayTrie(order, max_nodes)

    def grower(self, tables: Any, vocabulary: int, config: AdaptiveConfig, sampled: bool) -> Any:
        """One sequence's view of the sources."""
        use = {source: source in config.sources for source in SOURCES}
        top = config.sampled_top if sampled else config.top
        if not self.compiled:
            return Grower(tables, vocabulary, use, top)
        from .compiled_grower import CompiledGrower

        return CompiledGrower(tables, vocabulary, use, config.max_rows, top)
