"""A light head for a model, from the model alone: its text, the hidden states along it, and the training.

Each of the three stages continues where an earlier run ended. The text is that of ``lookahead learn``.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from ..core import SettingsError
from ..drafters.adaptive.base_files import table_name
from ..models.head_file import BLOCK, HeadWeights
from ..records import cache_folder
from ..targets.light_head import PATHS, own_head_file, row_readers, sizes_of
from .hidden_states import check_room, collect
from .self_text import Folder, Writer
from .train_head import Positions, Training, TrainSettings

if TYPE_CHECKING:
    from ..llm import LLM

#: Called with the stage's name, what is done and all of it, the seconds left if known, and the loss if there is one.
Report = Callable[[str, int, int, float | None, float | None], None]
#: Names of the stages.
TEXT, STATES, TRAINING = "text", "hidden states", "training"


class HeadLearner:
    """Trains a light head for a model on text of its own.

    Args:
        llm: the model, with a tokenizer.
        tokens: tokens of text; if fewer are kept, the rest is written.
        settings: of the training.
        output: the file of the head; None for the one that ``head="auto"`` finds.
        note: called with lines that the user should read.

    Attributes:
        texts: the kept text.
        folder: where the hidden states and the checkpoint are kept, 2 bytes for each number of a hidden state.

    Raises:
        SettingsError: the model gives no hidden states or has no tokenizer, a folder cannot be written, the disk has
            too little room, or kept text is damaged.
    """

    def __init__(
        self,
        llm: LLM,
        tokens: int,
        settings: TrainSettings,
        output: Path | None = None,
        note: Callable[[str], None] = lambda line: None,
    ) -> None:
        if tokens < 1:
            raise SettingsError(f"the tokens to learn from must be at least 1, got {tokens}")
        self._llm, self._tokens, self._settings, self._note = llm, tokens, settings, note
        # What the model must be.
        self._vocabulary, self._hidden = sizes_of(llm.model)
        self._embed, self._output_rows = row_readers(llm.model)
        self._target = llm.target()
        if self._target.path not in PATHS:
            raise SettingsError(
                f"a light head needs hidden states, and the path {self._target.path!r} does not give them"
            )
        if self._hidden % BLOCK:
            raise SettingsError(
                f"a light head needs hidden states of a multiple of {BLOCK} numbers, and those of this model have "
                f"{self._hidden}"
            )
        # Where everything is kept.
        name = table_name(llm.model.config)
        self.texts = Folder(cache_folder() / "self-text" / name)
        self.folder = cache_folder() / "heads" / name
        self.output = output if output is not None else own_head_file(llm.model)
        for folder in (self.texts.path, self.folder, self.output.absolute().parent):
            Folder(folder, scan=False).check_writable()
        self._writer = Writer(llm, self.texts)
        kept = sum(file.stat().st_size for file in self.folder.glob("part-*.npy"))
        check_room(self.folder, self._hidden, max(tokens, self.texts.tokens) - kept // (2 * self._hidden))

    def run(self, report: Report = lambda stage, done, total, left, loss: None) -> HeadWeights:
        """Do what is left of the three stages, and save the head. An interruption loses at most a minute of work.

        Args:
            report: progress.
        """
        kept, missing = self.texts.tokens, self._tokens - self.texts.tokens
        if missing > 0:

            def written(count: int, seconds: float) -> None:
                left = (missing - count) * seconds / count if count else None
                report(TEXT, kept + count, self._tokens, left, None)

            self._writer.write(lambda count, seconds: count >= missing, written)
        parts = collect(
            self._target,
            self._hidden,
            self.texts,
            self.folder,
            lambda done, total, left: report(STATES, done, total, left, None),
        )
        training = Training(
            Positions(parts),
            self._embed,
            self._output_rows,
            self._vocabulary,
            self._settings,
            self.folder,
            str(self._llm.model.device),
        )
        for line in training.notes:
            self._note(line)
        training.run(lambda now: report(TRAINING, now.step, now.steps, now.left, now.loss))
        head = training.weights()
        head.save(self.output)
        return head
