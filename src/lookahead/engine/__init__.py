"""From a model to text: loading, options, detokenisation, stop strings, streaming. Talks to targets and core.

The life of a prompt:
    loading.load          a path or hub id -> LLM (model, tokenizer, probe)
    prompts.encode        text, chat messages or token ids -> token ids, checked
    options.Options       sampling and length, checked; -> logits processors
    llm.LLM.run           a Decoder over a fresh target; an Update per step and prompt
    text.TextStream       tokens -> text that is safe to show (whole characters, no stop string)
    llm.Result            text, tokens, finish reason, Stats
"""

from .llm import LLM, Stream
from .loading import BUNDLED, load
from .options import Options
from .refresh import refresh
from .results import Result, Update

__all__ = ["BUNDLED", "LLM", "Options", "Result", "Stream", "Update", "load", "refresh"]
