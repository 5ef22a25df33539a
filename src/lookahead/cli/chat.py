"""``lookahead chat``: a conversation on the terminal, streamed. The model's chat template makes the prompts.

A model without a chat template continues text instead: the prompt is everything said so far.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ..core import LookaheadError
from . import options as opt
from .console import note, problem

if TYPE_CHECKING:
    from ..engine import LLM

app = typer.Typer(add_completion=False)
HELP = "/reset forgets the conversation, /stats shows the last answer's figures, /quit or Ctrl-D ends"


@app.command()
def chat(
    model: opt.Model = None,
    system: Annotated[str | None, typer.Option(help="A system message to begin with.")] = None,
    max_new_tokens: opt.MaxNewTokens = 512,
    stop: opt.Stop = None,
    method: opt.Method = None,
    lookahead: opt.Triple = None,
    window_size: opt.WindowSize = None,
    ngram_size: opt.NgramSize = None,
    guess_set_size: opt.GuessSetSize = None,
    preset: opt.Preset = None,
    max_rows: opt.MaxRows = None,
    sources: opt.Sources = None,
    no_budget: opt.NoBudget = False,
    warm: opt.Warm = None,
    temperature: opt.Temperature = 0.0,
    top_k: opt.TopK = None,
    top_p: opt.TopP = None,
    min_p: opt.MinP = None,
    repetition_penalty: opt.RepetitionPenalty = None,
    seed: opt.Seed = None,
    dtype: opt.Dtype = "auto",
    device: opt.Device = None,
    threads: opt.Threads = None,
    revision: opt.Revision = None,
    trust_remote_code: opt.TrustRemoteCode = False,
) -> None:
    """Talk with a model; answers stream as tokens are accepted."""
    from .generate import check_options

    method, config = opt.settings(
        method, lookahead, window_size, ngram_size, guess_set_size, preset, max_rows, sources, no_budget, warm
    )
    options: dict[str, Any] = {
        "max_new_tokens": max_new_tokens, "temperature": temperature, "top_k": top_k, "top_p": top_p,
        "min_p": min_p, "repetition_penalty": repetition_penalty, "seed": seed, "stop": stop or None,
    }  # fmt: skip
    check_options(options)
    llm = opt.load_model(
        model, dtype=dtype, device=device, threads=threads, revision=revision,
        trust_remote_code=trust_remote_code, method=method, config=config,
    )  # fmt: skip
    with opt.warm_pool(llm, warm) as kept:
        if not kept and method == "adaptive":  # one conversation is one text, whoever keeps it
            kept = {"pool": llm.warm_state()}
        _converse(llm, system, options | kept)


def _converse(llm: LLM, system: str | None, options: dict[str, Any]) -> None:
    """Read and answer lines until /quit or the end of the input."""
    conversation = Conversation(llm, system)
    if not conversation.templated:
        note("this model has no chat template: it continues the text so far", "yellow")
    note(HELP)
    while (line := _ask()) is not None:
        command = line.strip()
        if command == "/quit":
            break
        if command == "/reset":
            conversation = Conversation(llm, system)
        elif command == "/stats":
            note(conversation.figures)
        elif command.startswith("/"):
            problem(f"unknown command {command.split()[0]!r}; {HELP}")
        elif command:
            _answer(conversation, line, options)


def _ask() -> str | None:
    """A line of the user's, or None at the end of the input."""
    try:
        return input("> " if sys.stdin.isatty() else "")
    except EOFError:
        return None


def _answer(conversation: Conversation, line: str, options: dict[str, Any]) -> None:
    """Stream one answer. A refused or failed one is said, and the conversation goes on without it."""
    try:
        answered = False
        for piece in conversation.say(line, options):
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


class Conversation:
    """What was said so far.

    Attributes:
        templated: whether the model has a chat template; without one the text is just continued.
        figures: of the last answer, for people.
    """

    def __init__(self, llm: LLM, system: str | None = None) -> None:
        self._llm = llm
        self.templated = bool(getattr(llm.tokenizer, "chat_template", None))
        self._messages: list[dict[str, str]] = (
            [] if system is None else [{"role": "system", "content": system}]
        )
        self._text = "" if system is None or self.templated else f"{system}\n"
        self.figures = "no answer yet"

    def say(self, line: str, options: dict[str, Any]) -> Any:
        """Yield the answer in pieces; both sides join the conversation once the answer has begun."""
        from .generate import summary

        message = {"role": "user", "content": line}
        prompt: Any = [*self._messages, message] if self.templated else f"{self._text}{line}"
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
            self.figures = summary(self._llm, stream.result)
