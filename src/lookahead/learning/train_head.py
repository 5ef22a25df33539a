"""Trains a light head (``drafters.adaptive.sources.head_file``) on a model's self-generated text.

At the position of a token y, the inputs of the head are the hidden state under which y was chosen and the embedding
of y. It predicts the distribution from which the next token was chosen; its predicted state is the input of the next
level. For a text  y0 y1 y2 y3 ...  chosen under the states  h0 h1 h2 h3 ..., three levels are trained as follows:

    level 1    (h0, y0) -> g1     its logits against the distribution of y1
    level 2    (g1, y1) -> g2     against that of y2
    level 3    (g2, y2) -> g3     against that of y3

The loss is the cross-entropy with the best tokens saved with the text at each position, as far as they are in the
shortlist; the model's own probabilities are more informative than the one token that was chosen (distillation, Hinton
et al., 2015). ``head_data`` holds out every twentieth text and counts how often guesses on it are right.

Training is a function of the text, the states, the settings and the dtype of its matrix products, which is the faster
one on the device where it begins. Every minute and on interruption, it saves a checkpoint, including the dtype, from
which the next run continues. Checkpoints of different text or settings are different files.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path
from time import monotonic

import numpy as np
import torch
from torch.nn.functional import linear

from ..core import SettingsError
from ..core.errors import first_line
from ..drafters.adaptive.sources.head_file import HeadWeights
from ..drafters.adaptive.sources.light_head import READ_SAMPLED
from ..hf.head_network import HeadNetwork
from ..records import CONTINUES, not_writable, replacing
from .head_data import Array, Positions, Report
from .text_parts import uninterrupted
from .train_settings import TrainSettings

#: The dtypes of matrix products, by name.
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
#: Seconds between checkpoints.
CHECKPOINT_SECONDS = 60.0
#: Number of steps over which the learning rate rises.
WARM_UP = 50
#: The final learning rate as a share of the peak.
LAST_RATE = 0.02
#: Largest norm of the gradient; larger gradients are scaled down.
CLIP = 1.0


@dataclass(frozen=True)
class Progress:
    """Training progress: steps done, all steps, seconds left, mean recent loss."""

    step: int
    steps: int
    left: float
    loss: float


class Training:
    """One training run, which continues from its checkpoint if there is one.

    Args:
        positions: the training data.
        embed, output: (tokens) -> the model's embeddings and output rows, fp32 (n, hidden).
        vocabulary: V.
        settings: see ``TrainSettings``.
        folder: the folder of the checkpoints.
        device: torch's name of the device.

    Attributes:
        file: the checkpoint.
        step, steps: steps done, and all steps.
        notes: messages for the caller, one line each.

    Raises:
        SettingsError: there is too little text, or the checkpoint is damaged.
    """

    def __init__(
        self,
        positions: Positions,
        embed: Callable[[Sequence[int]], Array],
        output: Callable[[Sequence[int]], Array],
        vocabulary: int,
        settings: TrainSettings,
        folder: Path,
        device: str = "cpu",
    ) -> None:
        self.positions = positions
        self.settings = settings
        self.vocabulary = vocabulary
        self.device = torch.device(device)
        self.notes: list[str] = []

        # The shortlist and the training data.
        if settings.shortlist > vocabulary:
            self.notes.append(
                f"the shortlist is limited to the vocabulary of {vocabulary} tokens ({settings.shortlist} requested)"
            )
        self.shortlist = positions.frequent(settings.shortlist)
        self.starts = positions.runs(settings.run, settings.levels)
        runs = max(1, settings.batch // settings.run)
        if len(self.starts) < runs or not len(positions.measured(settings.levels)):
            raise SettingsError(
                f"training needs more text: {len(positions)} tokens give {len(self.starts)} runs of "
                f"{settings.run} positions, but a step takes {runs}; increase --tokens"
            )
        self.runs = runs
        self.steps = math.ceil(settings.epochs * len(self.starts) / runs)

        #: The index of each token in the shortlist; -1 for the others.
        self._place = np.full(vocabulary, -1, np.int64)
        self._place[self.shortlist] = np.arange(len(self.shortlist))
        self._output = torch.from_numpy(output(self.shortlist.tolist())).to(self.device)
        # Only the embeddings of tokens in the text are needed.
        used = np.unique(positions.tokens)
        self._embedding_of = np.zeros(vocabulary, np.int64)
        self._embedding_of[used] = np.arange(len(used))
        self._embeddings = torch.from_numpy(embed(used.tolist())).to(self.device)

        # The network, the optimizer and the state of the training.
        torch.manual_seed(settings.seed)
        self.network = HeadNetwork(self._output.shape[1], settings.width)
        self.network.reset_parameters()
        self.network.to(self.device)
        self._optimizer = torch.optim.AdamW(
            self.network.parameters(), lr=settings.rate, betas=(0.9, 0.98), weight_decay=0.01
        )
        self.step = 0
        self.seconds = 0.0
        self._loss = 0.0
        self._dtype = fast_dtype(self.device)
        self.file = folder / f"checkpoint-{self._identity}.safetensors"
        self._load()

    @cached_property
    def _identity(self) -> str:
        """A digest of the settings and sizes of the data that a checkpoint must match."""
        data = [len(self.positions), len(self.starts), len(self.shortlist), *self._output.shape]
        identity = {"settings": asdict(self.settings), "data": data}
        return hashlib.sha256(json.dumps(identity).encode()).hexdigest()[:12]

    def run(self, progress: Callable[[Progress], None] = lambda progress: None) -> None:
        """Train to the end. An exception, such as KeyboardInterrupt, saves a checkpoint first."""
        begin = saved = monotonic()
        before = self.seconds
        first = self.step
        batches = self._batches(first)
        try:
            while self.step < self.steps:
                loss = self._gradients(next(batches))
                with uninterrupted():  # a checkpoint must not have half an update, or one that is not counted
                    self._update()
                    self.step += 1
                self._loss += (loss - self._loss) * (0.02 if self._loss else 1.0)
                now = monotonic()
                self.seconds = before + now - begin
                left = (self.steps - self.step) * (now - begin) / (self.step - first)
                progress(Progress(self.step, self.steps, left, self._loss))
                if now - saved > CHECKPOINT_SECONDS:
                    self._save()
                    saved = monotonic()
        finally:
            self._save()

    def _batches(self, first: int) -> Iterator[Array]:
        """First positions of the runs of each step, from step ``first`` on; every epoch is shuffled."""
        per_epoch = len(self.starts) // self.runs
        while True:
            epoch, index = divmod(first, per_epoch)
            order = np.random.default_rng((self.settings.seed, epoch)).permutation(len(self.starts))
            for step in range(index, per_epoch):
                yield self.starts[order[step * self.runs : (step + 1) * self.runs]]
            first = (epoch + 1) * per_epoch

    def _rate(self) -> float:
        settings = self.settings
        done = self.step / self.steps
        cosine = LAST_RATE + (1 - LAST_RATE) * 0.5 * (1 + math.cos(math.pi * done))
        return settings.rate * min(1.0, (self.step + 1) / WARM_UP) * cosine

    def _gradients(self, starts: Array) -> float:
        """The gradients of runs that begin at these positions. Returns the loss of the first level."""
        settings = self.settings
        at = starts[:, None] + np.arange(settings.run)

        guess = self._tensor(self.positions.read(at))
        first = 0.0
        total = torch.zeros((), device=self.device)
        with torch.autocast(self.device.type, self._dtype, enabled=self._dtype is not torch.float32):
            for level in range(settings.levels):
                guess = self.network(guess.float(), self._embedded(at + level))
                loss = self._loss_at(guess, at + level + 1)
                total = total + settings.decay**level * loss
                # Later levels take as much time but gain less, so they are trained on fewer positions.
                if not level:
                    first = float(loss.detach())
                    deep = math.ceil(min(1.0, settings.deep) * len(at))
                    guess, at = guess[:deep], at[:deep]
        if not torch.isfinite(total):
            raise SettingsError("the loss must stay finite; a smaller --rate may help")
        self._optimizer.zero_grad(set_to_none=True)
        total.backward()  # type: ignore[no-untyped-call]
        torch.nn.utils.clip_grad_norm_(self.network.parameters(), CLIP)
        return first

    def _update(self) -> None:
        for group in self._optimizer.param_groups:
            group["lr"] = self._rate()
        self._optimizer.step()

    def _loss_at(self, guess: torch.Tensor, at: Array) -> torch.Tensor:
        """Cross-entropy of the guesses with the model's best tokens at these positions."""
        places = self._place[self.positions.ids[at]]
        shares = np.where(places >= 0, self.positions.probabilities[at], 0)
        logits = linear(guess, self._output.to(guess.dtype)).float() * self.network.log_scale.exp()
        chosen = logits.gather(-1, self._tensor(np.maximum(places, 0)))
        weights = self._tensor(shares.astype(np.float32))
        losses = weights.sum(-1) * logits.logsumexp(-1) - (weights * chosen).sum(-1)
        return losses.mean()

    def _embedded(self, at: Array) -> torch.Tensor:
        return self._embeddings[self._tensor(self._embedding_of[self.positions.tokens[at]])]

    def _tensor(self, array: Array) -> torch.Tensor:
        return torch.from_numpy(array).to(self.device)

    def report(self) -> Report:
        """The accuracy of the head now, on held-out text."""
        levels = self.settings.levels
        positions = self.positions.measured(levels)
        report = Report(levels)
        with torch.no_grad():
            for begin in range(0, len(positions), 1024):
                at = positions[begin : begin + 1024]
                guess = self._tensor(self.positions.read(at))
                for level in range(levels):
                    guess = self.network(guess, self._embedded(at + level))
                    logits = linear(guess, self._output) * self.network.log_scale.exp()
                    logs, places = logits.log_softmax(-1).topk(min(READ_SAMPLED, len(self.shortlist)))
                    truth = self.positions.ids[at + level + 1], self.positions.probabilities[at + level + 1]
                    report.count(level, self.shortlist[places.cpu().numpy()], logs.cpu().numpy(), *truth)
        return report

    def weights(self) -> HeadWeights:
        """The head as it is now, with the training's metadata for its file."""
        report = self.report()
        about = {
            "tokens": len(self.positions),
            "steps": self.step,
            "seconds": round(self.seconds),
            "accuracy": report.accuracy,
            "settings": asdict(self.settings),
        }
        return HeadWeights(
            vocabulary=self.vocabulary,
            shortlist=self.shortlist,
            levels=self.settings.levels,
            counts=report.counts,
            about=about,
            **self.network.arrays(),
        )

    def _save(self) -> None:
        from safetensors.torch import save

        tensors = {f"weight.{name}": value.detach() for name, value in self.network.named_parameters()}
        for name, value in self.network.named_parameters():
            moments = self._optimizer.state.get(value, {})
            tensors |= {f"{key}.{name}": moments[key] for key in ("exp_avg", "exp_avg_sq") if key in moments}
        texts = {"step": str(self.step), "seconds": str(self.seconds), "loss": str(self._loss)}
        texts["dtype"] = str(self._dtype).removeprefix("torch.")
        content = save({name: value.contiguous() for name, value in tensors.items()}, texts)
        try:
            self.file.parent.mkdir(parents=True, exist_ok=True)
            with replacing(self.file) as temporary:
                # ``save_file`` raises no OSError, and makes a file that other users cannot read.
                temporary.write_bytes(content)
        except OSError as error:
            raise not_writable(self.file, error, CONTINUES, "file") from None

    def _load(self) -> None:
        from safetensors import SafetensorError, safe_open

        if not self.file.exists():
            others = len(list(self.file.parent.glob("checkpoint*.safetensors")))
            if others:
                self.notes.append(
                    f"training starts from the beginning; {self.file.parent} keeps {others} "
                    f"checkpoint{'s' * (others > 1)} of other text or settings, which can be deleted"
                )
            return
        try:
            with safe_open(self.file, "pt", device=str(self.device)) as file:
                texts = file.metadata() or {}
                dtype = DTYPES[texts["dtype"]]
                step = int(texts["step"])
                for name, parameter in self.network.named_parameters():
                    with torch.no_grad():
                        parameter.copy_(file.get_tensor(f"weight.{name}"))
                    if step:
                        moments = {key: file.get_tensor(f"{key}.{name}") for key in ("exp_avg", "exp_avg_sq")}
                        self._optimizer.state[parameter] = {"step": torch.tensor(float(step)), **moments}
                self.step = step
                self._dtype = dtype
                self.seconds = float(texts["seconds"])
                self._loss = float(texts["loss"])
        except (SafetensorError, OSError, ValueError, KeyError, RuntimeError) as error:
            raise SettingsError(
                f"{self.file} is not a valid checkpoint ({first_line(error)}); delete it"
            ) from None


def fast_dtype(device: torch.device) -> torch.dtype:
    """The dtype of matrix products: bfloat16 if it is faster than float32 on this device."""
    seconds = {}
    for dtype in DTYPES.values():
        a, b = (torch.ones(rows, 512, dtype=dtype, device=device) for rows in (256, 2048))
        spent = []
        for _ in range(4):
            begin = monotonic()
            float((a @ b.T)[0, 0])  # waits for a GPU
            spent.append(monotonic() - begin)
        seconds[dtype] = min(spent)
    return min(seconds, key=lambda dtype: seconds[dtype])
