"""``lookahead chat``: a streamed conversation in the terminal, prompted with the model's chat template."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import replace
from typing import TYPE_CHECKING, Annotated, Any

import typer

from .. import Adaptive
from ..core import LookaheadError, SettingsError
from ..options import DraftOptions, LoadOptions, Options
from ..text.prompts import chat_prompt, has_chat_template
from .adapter import with_options
from .console import note, problem, summary
from .shared import check_stdin, load_model, warm_state

if TYPE_CHECKING:
    from ..core import Result
    from ..llm import LLM

HELP = (
    "/reset starts a new conversation, /stats shows the statistics of the last answer, /help shows these commands, "
    "/exit or Ctrl-D ends the chat"
)


class Conversation:
    """The messages so far.

    Args:
        llm: the model.
        system: the system message, or None.

    Attributes:
        last: the last answer that was not interrupted, or None.
    """

    def __init__(self, llm: LLM, system: str | None = None) -> None:
        self._llm = llm
        self._messages = [] if system is None else [{"role": "system", "content": system}]
        self.last: Result | None = None

    def say(self, line: str, **options: Any) -> Iterator[str]:
        """Yield the answer in pieces. Message and answer become part of the conversation, even if the answer is
        interrupted, but not if it fails.

        Args:
            line: the user's message.
            **options: see ``Options``.

        Raises:
            LookaheadError: the prompt is not valid, or decoding failed.
        """
        message = {"role": "user", "content": line}
        answer = ""
        prompt = chat_prompt([*self._messages, message], self._llm.tokenizer)
        with self._llm.stream(prompt, **options) as stream:
            try:
                for piece in stream:
                    answer += piece
                    yield piece
            except LookaheadError:
                answer = ""
                raise
            finally:
                if answer:
                    self._messages += [message, {"role": "assistant", "content": answer}]
        self.last = stream.result or self.last


@with_options(max_new_tokens=512, prefix_cache=1)
def chat(
    *,
    system: Annotated[str | None, typer.Option(help="The system message.")] = None,
    options: Options,
    draft: DraftOptions,
    load: LoadOptions,
) -> None:
    """Chat with a model; answers stream as tokens are accepted."""
    check_stdin()
    llm = load_model(load, draft.resolve())
    with warm_state(llm, draft.warm) as kept:
        if not kept and isinstance(llm.drafter, Adaptive):  # all answers of a conversation share one state
            kept = {"drafter": replace(llm.drafter, state=llm.warm_state())}
        _converse(llm, system, options.keywords() | kept)


def _converse(llm: LLM, system: str | None, options: dict[str, Any]) -> None:
    """Read and answer lines until /exit or the end of the input."""
    conversation = Conversation(llm, system)
    if not has_chat_template(llm.tokenizer):
        note("this model has no chat template, so it continues your text", "yellow")
    note(HELP)
    while True:
        try:
            line = input("> " if sys.stdin.isatty() else "")
        except EOFError:
            return
        except UnicodeDecodeError:
            raise SettingsError("the input must be UTF-8 text; convert it first") from None
        command = line.strip()
        if command in ("/exit", "/quit"):
            return
        if command == "/reset":
            conversation = Conversation(llm, system)
        elif command == "/help":
            note(HELP)
        elif command == "/stats":
            note("no answer yet" if conversation.last is None else summary(llm, conversation.last))
        elif command.startswith("/"):
            problem(f"unknown command {command.split()[0]!r}; {HELP}")
        elif command:
            _answer(conversation, line, options)


def _answer(conversation: Conversation, line: str, options: dict[str, Any]) -> None:
    """Stream one answer. If it fails, report that and continue the conversation without it."""
    answered = False
    try:
        for piece in conversation.say(line, **options):
            answered = True
            typer.echo(piece, nl=False, color=True)  # else it would lose its own colour codes
            sys.stdout.flush()
        typer.echo()
        if not answered:
            note("the answer is empty: its first token was an end token")
    except KeyboardInterrupt:  # ends only the answer
        typer.echo()
        kept = "partial answer stays in the conversation" if answered else "message is not answered"
        note(f"interrupted; the {kept}", "yellow")
    except LookaheadError as error:
        if answered:
            typer.echo()
        problem(f"{error} (/reset starts a new conversation)")
