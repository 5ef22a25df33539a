"""OpenVINO GenAI beside ours, on GGUF files, where the package openvino-genai is installed; it is never a dependency.

    openvino-greedy                plain decoding of the GGUF file that the model was read from
    openvino-lookup                its prompt lookup: at most ten tokens, n-grams of at most three
    openvino-lookup:FILE           another file; it reads Q8_0, Q4_0 and F16, and neither Q4_1 nor mixed files

Prompts are the same token ids and the number of threads is torch's. The package does not tell how many rows it
evaluates: a step of prompt lookup is counted as one row and its tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from time import perf_counter
from typing import Any

import numpy as np
import torch

from lookahead.bench.methods import Method, ModelUnderTest, Outcome, RunOptions, outcome_of
from lookahead.core import SettingsError

from .llamacpp import LOOKUP_TOKENS

OPENVINO = ("openvino-greedy", "openvino-lookup")
PACKAGE = "openvino-genai"
#: The longest n-gram that its prompt lookup looks for: the example of its documentation.
NGRAM = 3


class OpenVino(Method):
    """Greedy decoding by OpenVINO GenAI.

    Args:
        name: "openvino-greedy" or "openvino-lookup".
        file: a GGUF file; empty for the file that the model was read from.
        model: the model under test.

    Raises:
        SettingsError: the package is not installed, or there is no such file.
    """

    def __init__(self, name: str, file: str, model: ModelUnderTest) -> None:
        try:
            self.settings = {PACKAGE: version(PACKAGE)}
        except PackageNotFoundError:
            raise SettingsError(
                f"{name} needs {PACKAGE}, which is not installed: pip install {PACKAGE}"
            ) from None
        gguf = file or model.gguf
        if gguf is None or not Path(gguf).is_file():
            raise SettingsError(f"{name} needs a GGUF file, got {gguf or model.name}; give it as {name}:FILE")
        self.file, self.lookup = Path(gguf), name == "openvino-lookup"
        self.label = f"{name}:{self.file.name}"
        self._pipeline: Any = None

    def comparable(self, options: RunOptions) -> bool:
        """Never: it rounds differently."""
        return False

    def _load(self) -> Any:
        from openvino_genai import LLMPipeline

        options: dict[str, Any] = {"INFERENCE_NUM_THREADS": torch.get_num_threads()}
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

        if self._pipeline is None:
            self._pipeline = self._load()
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
        config.max_new_tokens, config.do_sample, config.apply_chat_template = (
            options.max_new_tokens,
            False,
            False,
        )
        config.stop_token_ids = set(model.eos)
        if self.lookup:
            config.num_assistant_tokens, config.max_ngram_size = LOOKUP_TOKENS, NGRAM
        ids = np.array([list(prompt)], np.int64)
        inputs = TokenizedInputs(openvino.Tensor(ids), openvino.Tensor(np.ones_like(ids)))
        start = perf_counter()
        new = list(self._pipeline.generate(inputs, config, Recorder()).tokens[0])
        # The end token is in the text where the streamer was not given it.
        new = new[: sum(sizes)]
        return outcome_of(len(prompt), new, [1] * (len(sizes) - 1), sizes, [start, *times])
