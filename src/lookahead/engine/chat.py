"""A conversation with a model, through its chat template.

A model without a chat template continues text instead: the prompt is everything said so far.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from .llm import LLM
from .results import Result


class Conversation:
    """What was said so far.

    Args:
        llm: who answers.
        system: a system message to begin with.

    Attributes:
        templated: whether the model has a chat template; without one the text is just continued.
        last: the last answer that was not interrupted, or None.
    """

    def __init__(self, llm: LLM, system: str | None = None) -> None:
        self._llm = llm
        self.templated = bool(getattr(llm.tokenizer, "chat_template", None))
        self._messages = [] if system is None else [{"role": "system", "content": system}]
        self._text = "" if system is None or self.templated else f"{system}\n"
        self.last: Result | None = None

    def say(self, line: str, **options: Any) -> Iterator[str]:
        """Yield the answer in pieces; both sides join the conversation once the answer has begun.

        Args:
            line: what the user says.
            **options: see ``Options``.

        Raises:
            LookaheadError: the prompt cannot be taken, or decoding failed.
        """
        message = {"role": "user", "content": line}
        prompt = [*self._messages, message] if self.templated else f"{self._text}{line}"
        answer = ""
        with self._llm.stream(prompt, **options) as stream:
            try:
                for piece in stream:
                    answer += piece
                    yield piece
            finally:
                if answer:
                    self._messages += [message, {"role": "assistant", "content": answer}]
                    self._text = f"{self._text}{line}{answer}\n"
        if stream.result is not None:
            self.last = stream.result
