"""A model class for lm-evaluation-harness: ``hf-lookahead`` is its ``hf`` with lookahead's decoding.

    python -m benchmarks.lm_eval run --model hf-lookahead \
        --model_args pretrained=MODEL,drafter=15/5/15 --tasks gsm8k

Everything except text generation is the harness's own, so scores can be compared with those of ``hf``; greedy
completions are equal token for token.
"""

from __future__ import annotations

from typing import Any

from lm_eval.api.registry import register_model
from lm_eval.models.huggingface import HFLM

from lookahead import as_drafter
from lookahead.core import SettingsError, Stats
from lookahead.text.tokenizer import GGUFTokenizer


@register_model("hf-lookahead")
class HFLookahead(HFLM):
    """``hf`` of lm-evaluation-harness, generating with lookahead.

    Args:
        drafter: a drafter as a string, with "/" instead of commas, because the harness splits its arguments at
            commas: "adaptive", "15/5/15".
        **keywords: those of ``hf``.

    Attributes:
        stats: the cost of each sequence.
    """

    def __init__(self, *args: Any, drafter: str = "adaptive", **keywords: Any) -> None:
        self.drafter = as_drafter(drafter.replace("/", ","))
        self.stats: list[Stats] = []
        keywords.setdefault("device", "cpu")
        if isinstance(
            keywords.get("tokenizer"), GGUFTokenizer
        ):  # the harness expects transformers' own classes
            keywords["tokenizer"] = keywords["tokenizer"].as_transformers
        super().__init__(*args, **keywords)
        if self.backend != "causal":
            raise SettingsError("hf-lookahead needs a decoder-only model")

    def _model_generate(self, context: Any, max_length: int, stop: list[str], **keywords: Any) -> Any:
        # The harness's stop criterion counts the rows of its batch, so every row is a separate batch.
        import torch

        mask = keywords.pop("attention_mask", None)
        rows = []
        for row in range(context.shape[0]):
            if mask is not None:
                keywords["attention_mask"] = mask[row : row + 1]
            rows.append(self._one(context[row : row + 1], max_length, stop, keywords)[0])
        pad = self.tokenizer.pad_token_id
        return torch.nn.utils.rnn.pad_sequence(rows, batch_first=True, padding_value=pad)

    def _one(self, context: Any, max_length: int, stop: list[str], keywords: dict[str, Any]) -> Any:
        from lookahead import generate

        return super()._model_generate(
            context,
            max_length,
            stop,
            custom_generate=generate,
            drafter=self.drafter,
            stats=self.stats,
            **keywords,
        )


if __name__ == "__main__":
    from lm_eval.__main__ import cli_evaluate

    cli_evaluate()
