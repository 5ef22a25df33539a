"""Makes a light head from a model alone, in three stages: self-generated text, its hidden states, training.

Each stage continues where an earlier run ended. The text is shared with ``lookahead learn``.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from ..core import SettingsError
from ..drafters.adaptive.heads import check_hidden, own_head_file
from ..drafters.adaptive.sources.head_file import BLOCK, FORMAT, HeadWeights
from ..records import CONTINUES, cache_folder, not_writable
from .head_data import Positions
from .hidden_states import check_room, collect
from .self_text import Writer, check_folder, check_output, folder_name, text_folder
from .text_parts import Folder
from .train_head import Training
from .train_settings import TrainSettings

if TYPE_CHECKING:
    from ..llm import LLM

#: Called with (stage, amount done, total amount, seconds left or None if unknown, loss or None if there is none).
Report = Callable[[str, int, int, float | None, float | None], None]
#: Names of the stages.
TEXT, STATES, TRAINING = "text", "hidden states", "training"


class HeadLearner:
    """Trains a light head for a model on text that the model wrote by itself.

    Args:
        llm: the model, with a tokenizer.
        tokens: number of tokens of text; if fewer are saved, the rest is written first, if more are, all are used.
        settings: of the training.
        output: the file of the head; None for the one that ``head="auto"`` finds.
        note: called with messages for the user, one line each.

    Attributes:
        texts: the saved text.
        folder: the folder of the hidden states (2 bytes per number) and the checkpoints.

    Raises:
        SettingsError: the model does not provide hidden states or has no tokenizer, a folder cannot be written, the
            disk has too little free space, or saved text is damaged.
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
        self._llm = llm
        self._tokens = tokens
        self._settings = settings
        self._note = note

        # The model, checked for hidden states.
        self._parts = llm.model.head_parts()
        hidden = self._parts.hidden
        self._target = llm.target()
        check_hidden(self._target)
        if hidden % BLOCK:
            raise SettingsError(
                f"a light head needs a hidden size that is a multiple of {BLOCK}, but this model's is {hidden}"
            )

        # The folders and files, checked before hours of work.
        self.texts = Folder(text_folder(llm.model))
        self.folder = cache_folder() / "heads" / folder_name(llm.model)
        self.output = output if output is not None else own_head_file(llm.model.shape.name)
        for folder in (self.texts.path, self.folder, self.output.absolute().parent):
            check_folder(folder)
        if output is not None:
            check_output(output, "light head", lambda about: about.get("format", "").startswith(FORMAT[:-1]))
        self._writer = Writer(llm, self.texts)
        kept = sum(file.stat().st_size for file in self.folder.glob("part-*.npy"))
        check_room(self.folder, hidden, max(tokens, self.texts.tokens) - kept // (2 * hidden))

    def run(self, report: Report = lambda stage, done, total, left, loss: None) -> HeadWeights:
        """Complete the three stages and save the head. An interruption loses at most a minute of work.

        Args:
            report: called with the progress.

        Raises:
            SettingsError: a file cannot be written or its disk is full. The work so far is kept, and another run
                continues.
        """
        # Write the missing text.
        kept = self.texts.tokens
        missing = self._tokens - kept
        if missing < 0:
            self._note(
                f"training on all {kept:,} tokens of earlier runs, more than the {self._tokens:,} requested"
            )
        if missing > 0:

            def written(count: int, seconds: float) -> None:
                left = (missing - count) * seconds / count if count else None
                report(TEXT, kept + count, self._tokens, left, None)

            self._writer.write(lambda count, seconds: count >= missing, written)
        self._writer.close()

        # Compute its hidden states.
        parts = collect(
            self._target,
            self._parts.hidden,
            self.texts.parts(),
            self.folder,
            lambda done, total, left: report(STATES, done, total, left, None),
        )

        # Train the head on them.
        training = Training(
            Positions(parts),
            self._parts.embed,
            self._parts.output,
            self._parts.vocabulary,
            self._settings,
            self.folder,
            self._llm.model.device,
        )
        for line in training.notes:
            self._note(line)
        training.run(lambda now: report(TRAINING, now.step, now.steps, now.left, now.loss))
        head = training.weights()
        try:
            head.save(self.output)
        except OSError as error:
            raise not_writable(self.output, error, CONTINUES, "file") from None
        training.file.unlink(missing_ok=True)
        return head
