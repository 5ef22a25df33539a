"""A model class for lm-evaluation-harness: ``hf-lookahead`` is its ``hf`` with lookahead's decoding.

    python -m benchmarks.lm_eval run --model hf-lookahead \
        --model_args pretrained=MODEL,lookahead=15/5/15 --tasks gsm8k

Everything but the generation of text is the harness' own, so scores can be compared with those of ``hf``;
greedy texts are the same, token for token.
"""

from __future__ import annotations

from typing import Any

from lm_eval.api.registry import register_model
from lm_eval.models.huggingface import HFLM

from lookahead import as_drafter
from lookahead.core import SettingsError, Stats
from lookahead.models.tokenizer import GGUFTokenizer


@register_model("hf-lookahead")
class HFLookahead(HFLM):
    """``hf`` of lm-evaluation-harness, whose texts are generated with lookahead.

    Args:
        drafter: a drafter as text, with "/" for each comma, because the harness splits its arguments at commas:
            "adaptive", "15/5/15".
        **keywords: those of ``hf``.

    Attributes:
        stats: what each sequence cost.
    """

    def __init__(self, *args: Any, drafter: str = "adaptive", **keywords: Any) -> None:
        self.drafter = as_drafter(drafter.replace("/", ","))
        self.stats: list[Stats] = []
        keywords.setdefault("device", "cpu")
        if isinstance(
            keywords.get("tokenizer"), GGUFTokenizer
        ):  # the harness takes transformers' own classes
            keywords["tokenizer"] = keywords["tokenizer"].as_transformers
        super().__init__(*args, **keywords)
        if self.backend != "causal":
            raise SettingsError("hf-lookahead needs a decoder-only model")

    def _model_generate(self, context: Any, max_length: int, stop: list[str], **keywords: Any) -> Any:
        # The harness' stop criterion counts the rows of its batch, so every row is a batch of its own.
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
        from lookahead.integrations.hf import generate

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
