"""A conversation with a model, through its chat template."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from .llm import LLM
from .results import Result


class Conversation:
    """What was said so far. A model without a chat template continues it as one text instead.

    Args:
        llm: who answers.
        system: a system message to begin with.

    Attributes:
        templated: whether the model has a chat template.
        last: the last answer that was not interrupted, or None.
    """

    def __init__(self, llm: LLM, system: str | None = None) -> None:
        self._llm = llm
        self.templated = bool(getattr(llm.tokenizer, "chat_template", None))
        self._messages = [] if system is None else [{"role": "system", "content": system}]
        self._text = "" if system is None else f"{system}\n"
        self.last: Result | None = None

    def say(self, line: str, **options: Any) -> Iterator[str]:
        """Yield the answer in pieces (see ``Options``); both sides join the conversation once it has begun.

        Raises:
            LookaheadError: the prompt cannot be taken, or decoding failed.
        """
        message = {"role": "user", "content": line}
        answer = ""
        prompt = [*self._messages, message] if self.templated else f"{self._text}{line}"
        with self._llm.stream(prompt, **options) as stream:
            try:
                for piece in stream:
                    answer += piece
                    yield piece
            finally:
                if answer:
                    self._messages += [message, {"role": "assistant", "content": answer}]
                    self._text += f"{line}{answer}\n"
        self.last = stream.result or self.last
