"""The server's record of one text in an answer, from the checked request to the last chunk."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from time import monotonic
from typing import Any

from ..core import LookaheadError, Request
from ..engine.results import Sequence, Update
from ..engine.text import TextStream
from .logprobs import LogProbs
from .prediction import Predicted
from .tools import CallReader


class Refused(LookaheadError):
    """The server has refused a text or ended it.

    Attributes:
        status: the HTTP status.
        code: the error code of the API.
        retry_after: seconds after which the client may try again, or None.
    """

    def __init__(self, message: str, status: int, code: str, retry_after: int | None = None) -> None:
        super().__init__(message)
        self.status, self.code, self.retry_after = status, code, retry_after


@dataclass(slots=True, eq=False)
class Choice:
    """One text of an answer. ``Sequence.tag`` holds it while the engine decodes.

    Attributes:
        index: its index in the answer.
        request, text, seed: what the engine decodes.
        deadline: time at which the text is ended, by ``time.monotonic``.
        deliver: receives every update on the loop's thread; it must not block.
        logprobs: records log-probabilities; None if they are not requested.
        predicted: compares the text with the prediction; None without a prediction.
        created, first_token: times of the request and of the first token, by ``time.monotonic``.
        sequence: the engine's handle, once the text has been submitted.
        calls: extracts tool calls from the text; None without tools.
        shown: the text of the answer so far.
        entries: its log-probabilities, in the form of the endpoint.
        tool_calls: the calls at the end of the text.
        finish: the finish reason, as the API names it.
        offset: number of characters in the prompt and the text so far.
    """

    index: int
    request: Request
    text: TextStream
    seed: int | None
    deadline: float
    deliver: Callable[[Update], None]
    logprobs: LogProbs | None = None
    predicted: Predicted | None = None
    created: float = field(default_factory=monotonic)
    first_token: float | None = None
    sequence: Sequence | None = None
    calls: CallReader | None = None
    shown: str = ""
    entries: list[dict[str, Any]] = field(default_factory=list)
    tool_calls: list[dict[str, Any]] = field(default_factory=list)
    finish: str | None = None
    offset: int = 0
