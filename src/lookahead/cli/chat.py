"""``lookahead chat``: a conversation on the terminal, streamed. The model's chat template makes the prompts."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ..core import LookaheadError
from ..engine.options import DraftOptions, LoadOptions, Options
from .console import note, problem, summary
from .options import load_model, takes, warm_pool

if TYPE_CHECKING:
    from ..engine.chat import Conversation
    from ..engine.llm import LLM

HELP = "/reset forgets the conversation, /stats shows the last answer's figures, /quit or Ctrl-D ends"


@takes(max_new_tokens=512, prefix_cache=1)
def chat(
    *,
    system: Annotated[str | None, typer.Option(help="A system message to begin with.")] = None,
    options: Options,
    draft: DraftOptions,
    load: LoadOptions,
) -> None:
    """Talk with a model; answers stream as tokens are accepted."""
    method, config = draft.resolve()
    llm = load_model(load, method, config)
    with warm_pool(llm, draft.warm) as kept:
        if not kept and method == "adaptive":  # one conversation is one text, whoever keeps it
            kept = {"pool": llm.warm_state()}
        _converse(llm, system, options.keywords() | kept)


def _converse(llm: LLM, system: str | None, options: dict[str, Any]) -> None:
    """Read and answer lines until /quit or the end of the input."""
    from ..engine.chat import Conversation

    conversation = Conversation(llm, system)
    if not conversation.templated:
        note("this model has no chat template: it continues the text so far", "yellow")
    note(HELP)
    while True:
        try:
            line = input("> " if sys.stdin.isatty() else "")
        except EOFError:
            return
        command = line.strip()
        if command == "/quit":
            return
        if command == "/reset":
            conversation = Conversation(llm, system)
        elif command == "/stats":
            note("no answer yet" if conversation.last is None else summary(llm, conversation.last))
        elif command.startswith("/"):
            problem(f"unknown command {command.split()[0]!r}; {HELP}")
        elif command:
            _answer(conversation, line, options)


def _answer(conversation: Conversation, line: str, options: dict[str, Any]) -> None:
    """Stream one answer. A refused or failed one is said, and the conversation goes on without it."""
    answered = False
    try:
        for piece in conversation.say(line, **options):
            answered = True
            typer.echo(piece, nl=False)
            sys.stdout.flush()
        typer.echo()
        if not answered:
            note("the model ended its text at once")
    except KeyboardInterrupt:  # ends the answer, not the conversation
        typer.echo()
        note("interrupted; what was said so far stays", "yellow")
    except LookaheadError as error:
        problem(f"{error} (/reset forgets the conversation)")
