"""OpenVINO GenAI alongside ours, if the package openvino-genai is installed; never a dependency.

    openvino-greedy                plain decoding of the GGUF file that the model was read from
    openvino-lookup                its prompt lookup: at most ten tokens, n-grams of at most three
    openvino-lookup:FILE           another file; it reads Q8_0, Q4_0 and F16, and neither Q4_1 nor mixed files; or a
                                   folder of its own format, which ``benchmarks.convert_gguf`` makes
    openvino-lookup:FILE:5,3       at most five tokens, n-grams of at most three
    openvino-greedy:FILE:f32       computes in float32; the default on a processor with AMX is bf16, which is slower
    openvino-lookup:FILE:5,3:f32   both

Prompts are the same token ids and the number of threads is torch's. The package does not report how many rows it
evaluates, so a step of prompt lookup counts as one row and its tokens.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from time import perf_counter
from typing import Any

import numpy as np
import torch

from lookahead.bench.methods import Method, ModelUnderTest, Outcome, RunOptions
from lookahead.core import SettingsError

from .outcomes import LOOKUP_TOKENS, MissingPackage, outcome_of

OPENVINO = ("openvino-greedy", "openvino-lookup")
PACKAGE = "openvino-genai"
#: The longest n-gram of its prompt lookup; the example in its documentation.
NGRAM = 3
#: The file with the graph of a model in a folder of OpenVINO's own format.
MODEL = "openvino_model.xml"
#: Precisions of its computation that may be asked for, as OpenVINO names them.
PRECISIONS = ("f32", "bf16")


class OpenVino(Method):
    """Greedy decoding by OpenVINO GenAI; the names are in ``OPENVINO``.

    Args:
        name: one of ``OPENVINO``.
        given: FILE, or FILE:SETTINGS with TOKENS,NGRAM for prompt lookup, "f32", or both, separated by a colon. An
            empty file stands for the model's own; a folder is read in OpenVINO's own format.
        model: the model under test.

    Raises:
        MissingPackage: the package is not installed.
        SettingsError: the file is missing, or the settings are others.
    """

    def __init__(self, name: str, given: str, model: ModelUnderTest) -> None:
        try:
            self.settings = {PACKAGE: version(PACKAGE)}
        except PackageNotFoundError:
            raise MissingPackage(
                f"{name} needs {PACKAGE}, which is not installed: pip install {PACKAGE}"
            ) from None
        file, _, settings = given.partition(":")
        source = file or model.gguf
        if source is None or not (Path(source).is_file() or (Path(source) / MODEL).is_file()):
            raise SettingsError(
                f"{name} needs a GGUF file or a folder with {MODEL}, got {source or model.name}; "
                f"give it as {name}:FILE"
            )
        self.file = Path(source)
        self.lookup = name.endswith("-lookup")
        self.label = f"{name}:{self.file.name}"
        self.engine: Any = None  # loaded for the first prompt
        self.tokens, self.ngram, self.precision = LOOKUP_TOKENS, NGRAM, ""
        if not settings:
            return
        *sizes, last = settings.split(":")
        if last in PRECISIONS:
            self.precision = last
        else:
            sizes.append(last)
        pair = re.fullmatch(r"([1-9]\d*),([1-9]\d*)", sizes[0]) if sizes else None
        if (sizes and pair is None) or len(sizes) > self.lookup:
            raise SettingsError(
                f"{name} takes FILE, FILE:{PRECISIONS[0]}, and openvino-lookup also FILE:TOKENS,NGRAM such as "
                f"{self.file.name}:5,3 or {self.file.name}:5,3:{PRECISIONS[0]}; got {settings!r}"
            )
        if pair is not None:
            self.tokens, self.ngram = int(pair[1]), int(pair[2])
        self.label += f":{settings}"

    def comparable(self, options: RunOptions) -> bool:
        """Never, because it rounds differently."""
        return False

    def _load(self) -> Any:
        from openvino_genai import LLMPipeline

        options: dict[str, Any] = {"INFERENCE_NUM_THREADS": torch.get_num_threads()}
        if self.precision:
            options["INFERENCE_PRECISION_HINT"] = self.precision
        if self.lookup:
            options["prompt_lookup"] = True
        try:
            return LLMPipeline(str(self.file), "CPU", **options)
        except RuntimeError as error:
            raise SettingsError(f"{self.label}: OpenVINO GenAI cannot read this file: {error}") from None

    def decode(self, model: ModelUnderTest, prompt: Sequence[int], options: RunOptions) -> Outcome:
        if options.temperature:
            raise SettingsError(f"{self.label} is greedy, got temperature {options.temperature:g}")
        import openvino
        from openvino_genai import GenerationConfig, StreamerBase, StreamingStatus, TokenizedInputs

        if self.engine is None:
            self.engine = self._load()
        sizes: list[int] = []
        times: list[float] = []

        class Recorder(StreamerBase):  # type: ignore[misc]
            def write(self, tokens: int | Sequence[int]) -> Any:
                sizes.append(1 if isinstance(tokens, int) else len(tokens))
                times.append(perf_counter())
                return StreamingStatus.RUNNING

            def end(self) -> None:
                pass

        config = GenerationConfig()
        config.max_new_tokens = options.max_new_tokens
        config.do_sample = False
        config.apply_chat_template = False
        config.stop_token_ids = set(model.eos)
        if self.lookup:
            config.num_assistant_tokens = self.tokens
            config.max_ngram_size = self.ngram
        ids = np.array([list(prompt)], np.int64)
        inputs = TokenizedInputs(openvino.Tensor(ids), openvino.Tensor(np.ones_like(ids)))
        start = perf_counter()
        new = list(self.engine.generate(inputs, config, Recorder()).tokens[0])
        # The output contains the end token even if the streamer did not receive it.
        new = new[: sum(sizes)]
        outcome = outcome_of(len(prompt), new, [1] * (len(sizes) - 1), sizes, [start, *times])
        outcome.knows_rows = not self.lookup
        return outcome
