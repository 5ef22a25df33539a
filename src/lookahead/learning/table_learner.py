"""``learn``: writes a model's own text and builds the base table of its tokenizer.

The text is kept in the user's cache folder, so that learning can be interrupted and continued; the table is rebuilt
from all of it, from the text of other models with the same tokenizer, and from the corpus.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from ..core import SettingsError
from ..drafters.adaptive.base_files import cannot_build, key_of, table_file
from ..drafters.adaptive.sources.base_table import BaseTable, open_table, save_table
from . import corpus
from .self_text import Writer, check_folder, check_output, text_folder
from .table import MOST_CONTEXTS, build, limited
from .text_parts import Folder

if TYPE_CHECKING:
    from ..llm import LLM


@dataclass(frozen=True)
class Goal:
    """When there is enough text: after a time in seconds, or at a total number of tokens. None for no limit."""

    seconds: float | None = None
    tokens: int | None = None

    def __post_init__(self) -> None:
        if self.seconds is not None and not self.seconds > 0:
            raise SettingsError(f"the time to learn must be above 0, got {self.seconds:g} seconds")
        if self.tokens is not None and self.tokens < 1:
            raise SettingsError(f"the tokens to learn from must be at least 1, got {self.tokens}")
        if self.seconds is None and self.tokens is None:
            raise SettingsError("learning needs a limit in minutes or in tokens; give one of them")

    def share(self, kept: int, tokens: int, seconds: float) -> float:
        """The share of the goal that is done, at least 0; the goal is reached at 1.

        Args:
            kept: number of tokens of earlier runs.
            tokens, seconds: tokens and time of this run.
        """
        by_time = seconds / self.seconds if self.seconds is not None else 0.0
        by_text = (kept + tokens) / self.tokens if self.tokens is not None else 0.0
        return max(by_time, by_text)

    def left(self, kept: int, tokens: int, seconds: float) -> float | None:
        """The seconds left at the speed of this run; None before its first token if there is no limit of time."""
        left = [self.seconds - seconds] if self.seconds is not None else []
        if self.tokens is not None and tokens:
            left.append((self.tokens - kept - tokens) * seconds / tokens)
        return max(0.0, min(left)) if left else None


class Learner:
    """Writes text of a model and builds the table of its tokenizer.

    Args:
        llm: the model, with a tokenizer.
        output: the file of the table; None for the one that is found by the tokenizer.

    Attributes:
        folder: the folder of this model's text.

    Raises:
        SettingsError: the model has no tokenizer, a folder cannot be written, or earlier text or the package's corpus
            is damaged.
    """

    def __init__(self, llm: LLM, output: Path | None = None) -> None:
        self._llm = llm
        self._key = key_of(llm.model)
        self.output = output if output is not None else table_file(self._key)
        self.folder = Folder(text_folder(llm.model))
        for folder in (self.folder.path, self.output.absolute().parent):
            check_folder(folder)
        if output is not None:
            check_output(output, "base table", lambda about: "learned" in about)
        # Read now, because a damaged file should not be found after ten minutes of writing.
        self._corpus = None if cannot_build(llm.tokenizer) else corpus.texts()
        self._writer = Writer(llm, self.folder)

    def write(self, goal: Goal, progress: Callable[[float, int, float, float | None], None]) -> int:
        """Write text until the goal is reached. Returns the number of new tokens.

        The text is also saved after an interruption.

        Args:
            goal: when there is enough text.
            progress: called after every step with (share of the goal, number of new tokens, seconds, seconds left if
                known).
        """
        kept = self.folder.tokens
        return self._writer.write(
            lambda tokens, seconds: goal.share(kept, tokens, seconds) >= 1,
            lambda tokens, seconds: progress(
                goal.share(kept, tokens, seconds), tokens, seconds, goal.left(kept, tokens, seconds)
            ),
        )

    def build(self) -> BaseTable:
        """Build the table from all text of models with this tokenizer so far, and save it.

        Raises:
            SettingsError: there is too little text, or the table cannot be saved.
        """
        folders = [Folder(path, scan=False) for path in sorted(self.folder.path.parent.iterdir())]
        texts = (text for folder in folders for text in folder.read())
        known = None
        if self._corpus is not None:
            known = corpus.split(self._llm.tokenizer.backend_tokenizer, self._corpus)
        trie, counts, learned = build(texts, self._llm.vocabulary, MOST_CONTEXTS, known)
        if known is not None:
            # Little held-out text says little about the estimates.
            fitted = corpus.counts_of_kinds()
            counts = {name: limited(*np.add(own, fitted[name])) for name, own in counts.items()}
        try:
            save_table(self.output, trie, counts, self._llm.vocabulary, self._key, learned)
        except SettingsError as error:
            raise SettingsError(f"{error}; the text is kept, and the next run continues from it") from None
        return open_table(self.output)
