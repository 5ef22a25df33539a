"""llama.cpp's own server as a method of the benchmark, in a native build; its Python package is slower.
At a temperature above 0, it draws from the whole vocabulary, as our methods do.

    llamacpp-server                plain decoding of the GGUF file that the model was read from
    llamacpp-server:FILE           another file
    llamacpp-server:FILE:MODE      with drafts: a value of --spec-type without a draft model, such as ngram-mod
    llamacpp-server:FILE:MODE:N,M  the same with other numbers of tokens looked up and drafted; see ``draft_options``

The environment variable LLAMACPP_BIN names the folder of llama.cpp's programs. One server runs until the process
ends; with drafts, each completion has a server of its own, because some modes remember earlier completions and ours
start afresh. Tokens, passes and seconds are those that the server reports, so neither HTTP nor its start counts. It
reports totals, so the passes of a completion are given equal shares.
"""

from __future__ import annotations

import atexit
import os
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from itertools import accumulate
from pathlib import Path
from typing import Any

import httpx
import torch

from lookahead.bench.methods import Method, ModelUnderTest, Outcome, RunOptions
from lookahead.core import SettingsError

from .llamacpp_build import build_of
from .outcomes import MissingPackage, outcome_of
from .servers import started_llamacpp

LLAMA_SERVER = "llamacpp-server"
#: Tokens of context.
CONTEXT = 4096
#: Mode -> its options for the numbers after its name.
NUMBERS = {
    mode: (f"--spec-{mode}-size-n", f"--spec-{mode}-size-m") for mode in ("ngram-simple", "ngram-map-k")
}
NUMBERS["ngram-mod"] = ("--spec-ngram-mod-n-match", "--spec-ngram-mod-n-min", "--spec-ngram-mod-n-max")
_open = ExitStack()
atexit.register(_open.close)


def shares(total: int, parts: int) -> list[int]:
    """Whole numbers that differ by at most one and add up to a total.

    >>> shares(7, 3)
    [2, 2, 3]
    """
    ends = [total * (part + 1) // parts for part in range(parts)]
    return [end - begin for begin, end in zip([0, *ends], ends, strict=False)]


def draft_options(mode: str, numbers: str = "") -> list[str]:
    """The options of llama-server for a mode of drafting.

    Args:
        mode: a value of --spec-type.
        numbers: tokens looked up and drafted; of ngram-mod tokens looked up, fewest and most drafted. Empty for
            the defaults.

    Raises:
        SettingsError: the mode has no such numbers.

    >>> draft_options("ngram-map-k", "3,8")
    ['--spec-type', 'ngram-map-k', '--spec-ngram-map-k-size-n', '3', '--spec-ngram-map-k-size-m', '8']
    """
    values = numbers.split(",") if numbers else []
    names = NUMBERS.get(mode, ())
    if values and len(values) != len(names):
        raise SettingsError(f"{mode} of llama-server must have {len(names)} numbers, got {numbers}")
    options = [part for pair in zip(names, values, strict=False) for part in pair]
    return ["--spec-type", mode, *options]


class LlamaServer(Method):
    """Decoding by llama-server.

    Args:
        given: FILE, FILE:MODE or FILE:MODE:NUMBERS; an empty file stands for the model's own.
        model: the model under test.

    Raises:
        MissingPackage: LLAMACPP_BIN does not name a folder with llama-server.
        SettingsError: the file is missing.
    """

    def __init__(self, given: str, model: ModelUnderTest) -> None:
        folder = os.environ.get("LLAMACPP_BIN", "")
        program = Path(folder) / "llama-server"
        if not folder or not program.is_file():
            raise MissingPackage(
                f"{LLAMA_SERVER} needs llama.cpp's programs; set LLAMACPP_BIN to the folder that has llama-server"
            )
        name, _, self.mode = given.partition(":")
        file = name or model.gguf
        if file is None or not Path(file).is_file():
            raise SettingsError(
                f"{LLAMA_SERVER} needs a GGUF file, got {file or model.name}; give it as {LLAMA_SERVER}:FILE"
            )
        self.file = Path(file)
        self.label = ":".join([LLAMA_SERVER, self.file.name, *([self.mode] if self.mode else [])])
        self.settings = {"llama.cpp": build_of(program)}
        self._program = program
        draft_options(*self.mode.split(":", 1))  # raises an error before anything is measured
        self._client: httpx.Client | None = None

    def comparable(self, options: RunOptions) -> bool:
        """Never, because llama.cpp rounds differently."""
        return False

    def decode(self, model: ModelUnderTest, prompt: Sequence[int], options: RunOptions) -> Outcome:
        if options.temperature and self.mode:
            raise SettingsError(f"{self.label} is greedy, got temperature {options.temperature:g}")
        if len(prompt) + options.max_new_tokens > CONTEXT:
            raise SettingsError(
                f"{self.label} has {CONTEXT} positions, got {len(prompt)} prompt tokens and {options.max_new_tokens} "
                "new ones; leave the prompt out"
            )
        if self.mode:
            (answer,) = answers(
                self._program, self.file, torch.get_num_threads(), self.mode, [prompt], options
            )
        else:
            if self._client is None:
                server = started_llamacpp(self._program, self.file, torch.get_num_threads(), CONTEXT)
                self._client = _open.enter_context(
                    httpx.Client(base_url=_open.enter_context(server), timeout=600)
                )
            answer = complete(self._client, prompt, options)
        return outcome_of_answer(answer, len(prompt), min(model.eos, default=0))


def answers(
    program: Path | str,
    file: Path | str,
    threads: int,
    mode: str,
    prompts: Sequence[Sequence[int]],
    options: RunOptions,
) -> list[dict[str, Any]]:
    """Answers of a new server in a mode, as in MODE or MODE:NUMBERS, to prompts of token ids."""
    drafts = draft_options(*mode.split(":", 1))
    with (
        started_llamacpp(program, file, threads, CONTEXT, more=drafts) as address,
        httpx.Client(base_url=address, timeout=600) as client,
    ):
        # Not counted, because the first pass of a server is slower.
        complete(client, prompts[0][:8], replace(options, max_new_tokens=8))
        return [complete(client, prompt, options) for prompt in prompts]


def complete(client: httpx.Client, prompt: Sequence[int], options: RunOptions) -> dict[str, Any]:
    """The server's answer to a prompt of token ids."""
    body = {"prompt": list(prompt), "n_predict": options.max_new_tokens, "temperature": options.temperature}
    body |= {"cache_prompt": False, "return_tokens": True}
    if options.temperature:  # its defaults keep the 40 best tokens and drop improbable ones
        body |= {"top_k": options.top_k, "top_p": 1.0, "min_p": 0.0, "seed": options.seed}
    answer: dict[str, Any] = client.post("/completion", json=body).raise_for_status().json()
    return answer


def steps_of(timings: Mapping[str, Any]) -> int:
    """The passes after the prompt that llama-server reports. The first token comes from the prefill.

    A drafted end token counts as accepted, and its pass has no other token.
    """
    count = int(timings["predicted_n"])
    return max(count - 1 - int(timings.get("draft_n_accepted", 0)), min(1, count - 1))


def outcome_of_answer(answer: dict[str, Any], prompt_tokens: int, eos: int) -> Outcome:
    """The cost that llama-server reports. The first token comes from the prefill."""
    timings = answer["timings"]
    count = int(timings["predicted_n"])
    tokens = [
        *answer["tokens"],
        *[eos] * (count - len(answer["tokens"])),
    ]  # some versions return no end token
    steps = steps_of(timings)
    rows = shares(steps + int(timings.get("draft_n", 0)), steps)
    sizes = [1, *shares(count - 1, steps)]
    prefill = timings["prompt_ms"] / 1e3
    each = timings["predicted_ms"] / 1e3 / max(1, steps)
    times = [0.0, *accumulate([each] * steps, initial=prefill)]
    return outcome_of(prompt_tokens, tokens, rows, sizes, times)
