"""Work between the launch of a step and the first read of its logits: its timing, with unchanged output."""

from typing import ClassVar

import torch

from lookahead.core import Request, greedy
from lookahead.drafters import Lookahead, Plain
from lookahead.drafters.lookahead import LookaheadDraftState
from lookahead.hf.sampling import SeededTensors, TensorChooser
from lookahead.sampling.choose import Chooser
from lookahead.sampling.noise import SeededNoise
from lookahead.testing import FakeTarget, run

PROMPTS = [[1, 2, 3, 4, 5, 6, 3, 4], [5, 6, 7, 8, 1, 2, 3]]


class Launching(FakeTarget):
    """Logs when a step is launched and when its logits are read."""

    def __init__(self, log):
        super().__init__()
        self.log = log

    def forward(self, trees):
        scores = super().forward(trees)
        self.log.append("launch")
        for one, (_, tree) in zip(scores, trees, strict=True):
            self._note_reads(one, tree)
        return scores

    def _note_reads(self, scores, tree):
        honest = scores.best

        def best(node):
            self.log.append("read")
            return honest(node)

        scores.best = best


class Busy(Lookahead):
    """A drafter whose state logs its overlapped work and remembers the tree."""

    def start(self, sequence):
        return BusyState(self, sequence)


class BusyState(LookaheadDraftState):
    log: ClassVar = []

    def overlap(self, tree):
        self.log.append("overlap")
        self.seen = tree

    def observe(self, tree, scores, path, tokens):
        assert self.seen is tree
        super().observe(tree, scores, path, tokens)


def decode(drafter, log=None):
    requests = [Request(prompt, drafter, 40, greedy) for prompt in PROMPTS]
    return [g.tokens for g in run(Launching(log) if log is not None else FakeTarget(), requests)]


def test_it_runs_between_launch_and_read():
    log = BusyState.log = []
    texts = decode(Busy(5, 4, 5), log)
    assert texts == decode(Plain())
    steps = "".join(word[0] for word in log).split("l")[1:]
    assert len(steps) > 5
    for step in steps:
        sequences = step.count("o")
        assert sequences in (1, 2)
        assert step[:sequences] == "o" * sequences
        assert "r" in step[sequences:]
        assert "o" not in step[sequences:]


def test_noise_drawn_ahead_is_the_noise_that_would_have_been_drawn():
    def text(ahead):
        asked = []
        if ahead:
            noise = SeededTensors(7, len(PROMPTS[0]), 32, device="cpu")
            prepare = noise.prepare
            noise.prepare = lambda index: (asked.append(index), prepare(index))[1]
            choose = TensorChooser(PROMPTS[0], None, noise)
        else:
            noise = SeededNoise(7, len(PROMPTS[0]), 32)
            at = noise.at
            noise.at = lambda index: (asked.append(index), at(index))[1]
            choose = Chooser(PROMPTS[0], None, noise)
        target = Tensors()
        (sequence,) = run(target, [Request(PROMPTS[0], Lookahead(5, 4, 5), 40, choose)])
        return sequence, asked

    plain, asked = text(False)
    ahead, asked_ahead = text(True)
    assert ahead.tokens == plain.tokens
    assert ahead.stats.accepted > 0
    assert not asked  # on a CPU, a token is chosen without the noise of all other tokens
    assert len(asked_ahead) > len(asked)


class Tensors(FakeTarget):
    """Returns rows as tensors, as a model does; the best token stands out, so drafts are accepted."""

    def prefill(self, prompts):
        return self._as_tensors(super().prefill(prompts))

    def forward(self, trees):
        return self._as_tensors(super().forward(trees))

    def _as_tensors(self, scores):
        for one in scores:
            honest = one.row
            one.row = lambda node, honest=honest: 8 * torch.tensor(honest(node))
        return scores
