"""A client of one OpenAI-compatible server, with the standard library's HTTP.

Servers answer log-probabilities in two forms, and either may come from either address: parallel lists (completions),
or one object for each token (chat). Both become ``Token``.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from http.client import HTTPException
from typing import Any
from urllib.error import HTTPError
from urllib.parse import urlsplit
from urllib.request import HTTPRedirectHandler, Request, build_opener

from ..core import LookaheadError, SettingsError
from ..core.errors import first_line

#: Text, token ids, or chat messages.
Prompt = str | Sequence[int] | Sequence[Mapping[str, Any]]

#: Most likely tokens asked for at each position; OpenAI's API allows no more for completions.
TOP = 5
#: Largest answer read, in bytes.
LARGEST = 1 << 26
#: Statuses of servers that refuse a field.
REFUSED = (400, 404, 405, 422, 501)


class NoAnswer(LookaheadError):
    """A server did not answer as OpenAI's API requires.

    Attributes:
        status: the HTTP status; None if there was none.
    """

    def __init__(self, message: str, status: int | None = None) -> None:
        super().__init__(message)
        self.status = status


@dataclass(frozen=True, slots=True)
class Token:
    """A token of a completion.

    Attributes:
        text: its text.
        start: the index in the completion's text of its first character.
        logprob: its log-probability.
        top: the most likely tokens at its position and their log-probabilities, the most likely first.
    """

    text: str
    start: int
    logprob: float
    top: list[tuple[str, float]]


@dataclass(frozen=True, slots=True)
class Completion:
    """A completion as the server answered it.

    Attributes:
        text: its text.
        finish_reason: why it ended, as in "stop" or "length".
        count: its number of tokens, if the server says so.
        tokens: its tokens; empty if the server gives no log-probabilities.
    """

    text: str
    finish_reason: str | None
    count: int | None
    tokens: list[Token]


class NoRedirects(HTTPRedirectHandler):
    """Does not follow redirects, which would send prompts and keys elsewhere."""

    def redirect_request(self, *_: Any) -> None:
        return None


class Server:
    """An OpenAI-compatible server.

    Args:
        url: its address, with or without /v1.
        model: the name of the model; None for the first that the server lists.
        key: its API key, if it needs one.
        timeout: seconds to wait for an answer.

    Raises:
        SettingsError: the address is not an HTTP address.
    """

    def __init__(
        self, url: str, model: str | None = None, key: str | None = None, timeout: float = 300.0
    ) -> None:
        if urlsplit(url).scheme not in ("http", "https") or not urlsplit(url).hostname:
            raise SettingsError(
                f"a server's address must be like http://localhost:8000, got {url!r}; give scheme and host"
            )
        self.url = url.rstrip("/").removesuffix("/v1")
        self._asked = model
        self._key = key
        self._timeout = timeout
        self._opener = build_opener(NoRedirects())

    @cached_property
    def model(self) -> str:
        """The name of the model."""
        if self._asked is not None:
            return self._asked
        listed = self._call("/v1/models")
        try:
            return str(listed["data"][0]["id"])
        except (KeyError, IndexError, TypeError):
            raise NoAnswer(
                f"{self.url}/v1/models must list a model, and lists none; name the model"
            ) from None

    def complete(self, prompt: Prompt, fields: Mapping[str, Any], logprobs: bool = False) -> Completion:
        """Complete a prompt.

        Args:
            prompt: text and token ids are sent to completions, messages to chat completions.
            fields: more fields of the request.
            logprobs: whether to ask for log-probabilities.

        Raises:
            NoAnswer: the server cannot be reached, refuses the request or answers something else.
        """
        chat = not isinstance(prompt, str) and isinstance(prompt[0], Mapping)
        path = "/v1/chat/completions" if chat else "/v1/completions"
        asked: dict[str, Any] = {"logprobs": True, "top_logprobs": TOP} if chat else {"logprobs": TOP}
        body = {"model": self.model, "messages" if chat else "prompt": prompt, "stream": False}
        answer = self._call(path, body | (asked if logprobs else {}) | dict(fields))
        try:
            (choice,) = answer["choices"]
            # A model that answers with a tool call alone has no text.
            text = (choice["message"].get("content") if chat else choice["text"]) or ""
            usage = answer.get("usage") or {}
            tokens = _tokens(choice.get("logprobs"))
            return Completion(str(text), choice.get("finish_reason"), usage.get("completion_tokens"), tokens)
        except (KeyError, IndexError, TypeError, ValueError, AttributeError) as error:
            raise NoAnswer(
                f"{self.url}{path} must answer as OpenAI's API does, and its answer cannot be read "
                f"({type(error).__name__}: {first_line(error)})"
            ) from None

    def _call(self, path: str, body: Mapping[str, Any] | None = None) -> Any:
        headers = {"Content-Type": "application/json"}
        if self._key:
            headers["Authorization"] = f"Bearer {self._key}"
        data = None if body is None else json.dumps(body).encode()
        where = f"{self.url}{path}"
        try:
            with self._opener.open(Request(where, data, headers), timeout=self._timeout) as answer:
                return json.loads(answer.read(LARGEST))
        except HTTPError as error:
            with error:
                said = error.read(1 << 16).decode(errors="replace")
            raise NoAnswer(f"{where} answered {error.code}: {_message(said)}", error.code) from None
        except TimeoutError:
            raise NoAnswer(f"{where} must answer within {self._timeout:g} s, and did not") from None
        except (OSError, HTTPException) as error:  # URLError is an OSError
            reason = getattr(error, "reason", error)
            if isinstance(reason, TimeoutError):
                raise NoAnswer(f"{where} must answer within {self._timeout:g} s, and did not") from None
            raise NoAnswer(f"{where} cannot be reached ({reason or type(error).__name__})") from None
        except (ValueError, RecursionError):
            raise NoAnswer(f"{where} must answer JSON, and answered something else") from None


def _message(said: str) -> str:
    """The message of an error's body, in one line."""
    try:
        value = json.loads(said)
        error = value.get("error", value)
        said = str(error.get("message", said) if isinstance(error, dict) else error)
    except (ValueError, AttributeError, RecursionError):
        pass
    return " ".join(said.split())[:300] or "no message"


def _tokens(logprobs: Any) -> list[Token]:
    """The tokens of a choice; empty if it has no log-probabilities."""
    if not logprobs:
        return []
    if logprobs.get("content") is not None:
        return _objects(logprobs["content"])
    return _lists(logprobs)


def _objects(entries: list[dict[str, Any]]) -> list[Token]:
    """From one object for each token. A token may end within a character, so bytes are counted."""
    read = b""
    tokens = []
    for entry in entries:
        start = len(read.decode(errors="ignore"))
        top = [(each["token"], float(each["logprob"])) for each in entry.get("top_logprobs") or []]
        tokens.append(Token(entry["token"], start, float(entry["logprob"]), _sorted(top)))
        given = entry.get("bytes")
        read += entry["token"].encode() if given is None else bytes(given)
    return tokens


def _lists(logprobs: dict[str, Any]) -> list[Token]:
    """From parallel lists. Offsets may count from the prompt's first character."""
    texts = logprobs.get("tokens") or []
    offsets = logprobs.get("text_offset")
    if not offsets:
        offsets = [sum(map(len, texts[:i])) for i in range(len(texts))]
    tops = logprobs.get("top_logprobs") or [None] * len(texts)
    values = logprobs["token_logprobs"]
    return [
        Token(
            text, offset - offsets[0], float(value), _sorted([(t, float(v)) for t, v in (top or {}).items()])
        )
        for text, offset, value, top in zip(texts, offsets, values, tops, strict=True)
    ]


def _sorted(top: list[tuple[str, float]]) -> list[tuple[str, float]]:
    return sorted(top, key=lambda pair: -pair[1])
