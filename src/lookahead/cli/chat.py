"""``lookahead chat``: a streamed conversation in the terminal, prompted with the model's chat template.

On a terminal, prompt_toolkit reads the messages: line editing, a history across sessions, a paste as one message.
Otherwise each line of the input is a message.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from .. import Adaptive, AdaptiveState
from ..core import LookaheadError, SettingsError
from ..core.errors import shown
from ..option import offered
from ..options import DraftOptions, LoadOptions, MemoryOptions, Options
from ..records import cache_folder
from ..text.prompts import chat_prompt, has_chat_template
from .adapter import with_options
from .console import note, problem, summary
from .shared import check_stdin, load_model, read_text

if TYPE_CHECKING:
    from ..core import Result
    from ..llm import LLM

#: How answers are sampled unless the command line or the model says otherwise.
SAMPLING = {"temperature": 0.7, "top_p": 0.95}
#: Models with fewer parameters repeat themselves; this penalty ends it.
SMALL, PENALTY = 1_000_000_000, 1.1

Message = dict[str, str]


class Conversation:
    """The messages so far.

    Args:
        llm: the model.
        system: the system message, or None.

    Attributes:
        messages: {"role", "content"} each.
        last: the result of the last answer that was not interrupted, or None.
    """

    def __init__(self, llm: LLM, system: str | None = None) -> None:
        self._llm = llm
        self.messages: list[Message] = []
        self.last: Result | None = None
        self.set_system(system)

    def set_system(self, text: str | None) -> None:
        """Replace the system message; None removes it."""
        rest = [message for message in self.messages if message["role"] != "system"]
        self.messages = rest if not text else [{"role": "system", "content": text}, *rest]

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
        prompt = chat_prompt([*self.messages, message], self._llm.tokenizer)
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
                    self.messages += [message, {"role": "assistant", "content": answer}]
        self.last = stream.result or self.last

    def undo(self) -> str | None:
        """Remove the last message of the user and its answer. Returns that message; None if there is none."""
        if not self.messages or self.messages[-1]["role"] == "system":
            return None
        self.messages.pop()
        return self.messages.pop()["content"]

    def save(self, path: Path) -> None:
        """Write the messages as JSON.

        Raises:
            SettingsError: the file cannot be written.
        """
        try:
            path.write_text(json.dumps(self.messages, ensure_ascii=False, indent=1) + "\n", encoding="utf-8")
        except OSError as error:
            raise SettingsError(f"/save needs a writable file, got {path} ({error.strerror})") from None

    def load(self, path: Path) -> None:
        """Continue the conversation of a file.

        Raises:
            SettingsError: the file cannot be read, or has no messages as ``save`` writes them.
        """
        try:
            messages = json.loads(read_text(path, "/load"))
        except (ValueError, RecursionError) as error:
            if isinstance(error, SettingsError):
                raise
            raise SettingsError(
                f"/load needs a file that /save has written, and {path} is not JSON"
            ) from None
        roles = [
            isinstance(m, dict) and isinstance(m.get("content"), str) and m.get("role") for m in messages
        ]
        turns = roles[1:] if roles[:1] == ["system"] else roles
        if turns != ["user", "assistant"] * (len(turns) // 2):
            raise SettingsError(f"/load needs messages of user and assistant in turn, and {path} has others")
        self.messages = [{"role": m["role"], "content": m["content"]} for m in messages]


@with_options(max_new_tokens=512, prefix_cache=1, temperature=SAMPLING["temperature"])
def chat(
    context: typer.Context,
    *,
    system: Annotated[str | None, typer.Option(help="The system message.")] = None,
    options: Options,
    draft: DraftOptions,
    memory: MemoryOptions,
    load: LoadOptions,
) -> None:
    """Chat with a model; answers stream as tokens are accepted.

    Answers are sampled as the model or its file suggests; --temperature 0 is greedy.
    """
    check_stdin()
    sources = {name: context.get_parameter_source(name) for name in offered(Options)}
    given = {name for name, source in sources.items() if source is not None and source.name != "DEFAULT"}
    llm = load_model(load, draft.resolve(), memory)
    if not given & {"temperature", "top_k", "top_p", "min_p", "typical_p", "repetition_penalty"}:
        options = with_suggested_sampling(options, llm)
    kept: dict[str, Any] = {}
    if isinstance(llm.drafter, Adaptive):  # all answers of a conversation share one state
        kept = {"drafter": replace(llm.drafter, state=AdaptiveState(llm.drafter))}
    Chat(llm, system, options, kept).run()


def with_suggested_sampling(options: Options, llm: LLM) -> Options:
    """Options that sample as the model's authors suggest, or else with ``SAMPLING`` and, for a small model, a mild
    repetition penalty."""
    own: dict[str, Any] = SAMPLING | ({"repetition_penalty": PENALTY} if llm.parameter_count < SMALL else {})
    suggested: dict[str, Any] = dict(llm.model.sampling)
    if suggested.get("temperature") == 0:  # greedy, where the options of sampling are not allowed
        suggested = {
            name: suggested[name] for name in ("temperature", "repetition_penalty") if name in suggested
        }
    try:
        return replace(options, **suggested or own)
    except SettingsError as error:
        note(
            f"note: the sampling that the model suggests cannot be used ({shown(str(error), 160)}); using {own}"
        )
        return replace(options, **own)


class Chat:
    """Reads messages and commands, and prints answers.

    Args:
        llm: the model.
        system: the system message, or None.
        options: the options of each answer; ``/set`` changes them.
        more: further keywords of ``LLM.stream``.
    """

    def __init__(self, llm: LLM, system: str | None, options: Options, more: dict[str, Any]) -> None:
        self._llm = llm
        self._system = system
        self._options = options
        self._more = more
        self._conversation = Conversation(llm, system)
        #: command -> (its argument in the help, what it does, its method)
        self._commands: dict[str, tuple[str, str, Callable[[str], None]]] = {
            "/again": ("", "answers the last message again", self._again),
            "/undo": ("", "removes the last message and its answer", self._undo),
            "/reset": ("", "starts a new conversation", self._reset),
            "/system": ("TEXT", "replaces the system message", self._set_system),
            "/set": (
                "NAME VALUE",
                "changes an option of the next answers, as in /set temperature 0",
                self._set,
            ),
            "/save": ("FILE", "writes the conversation", lambda path: self._conversation.save(Path(path))),
            "/load": ("FILE", "continues a conversation", lambda path: self._conversation.load(Path(path))),
            "/stats": ("", "shows the statistics of the last answer", self._stats),
            "/help": ("", "shows the commands", self._help),
        }

    def run(self) -> None:
        """Read and answer messages until /exit or the end of the input."""
        if not has_chat_template(self._llm.tokenizer):
            note("this model has no chat template, so it continues your text", "yellow")
        note("/help shows the commands; /exit or Ctrl-D ends the chat")
        for text in messages_of_user():
            word, _, argument = text.strip().partition(" ")
            if word in ("/exit", "/quit"):
                return
            if word in self._commands and "\n" not in text.strip():
                self._do(word, argument.strip())
            elif word.startswith("/") and word[1:].isalpha():
                problem(f"unknown command {word!r}; /help shows the commands")
            elif word:
                self._answer(text)

    def _do(self, word: str, argument: str) -> None:
        needed, _, method = self._commands[word]
        if bool(argument) != bool(needed) and word != "/system":
            problem(f"{word} takes {needed or 'nothing'}, got {argument or 'nothing'!r}")
            return
        try:
            method(argument)
        except LookaheadError as error:
            problem(str(error))

    def _again(self, _: str) -> None:
        message = self._conversation.undo()
        if message is None:
            problem("there is no message to answer again")
        else:
            self._answer(message)

    def _undo(self, _: str) -> None:
        removed = self._conversation.undo()
        note("there is nothing to remove" if removed is None else f"removed: {removed.splitlines()[0][:60]}")

    def _reset(self, _: str) -> None:
        self._conversation = Conversation(self._llm, self._system)

    def _set_system(self, text: str) -> None:
        self._system = text or None
        self._conversation.set_system(self._system)

    def _set(self, words: str) -> None:
        name, _, text = words.partition(" ")
        known = offered(Options)
        if name not in known or not text:
            raise SettingsError(f"/set takes a name and a value; names are {', '.join(known)}")
        try:
            value = json.loads(text)
        except ValueError:
            value = text
        changed = {name: value}
        if changed == {"temperature": 0}:  # greedy: what only sampling uses goes too
            changed |= {other: None for other, *_ in Options.warpers() if other != "temperature"}
        self._options = replace(self._options, **changed)

    def _stats(self, _: str) -> None:
        last = self._conversation.last
        note("no answer yet" if last is None else summary(self._llm, last))

    def _help(self, _: str) -> None:
        for word, (argument, does, _method) in self._commands.items():
            note(f"{word} {argument}".strip() + f": {does}")
        note(
            "Alt-Enter begins a new line; Ctrl-C clears the line or ends an answer; /exit or Ctrl-D ends the chat"
        )

    def _answer(self, text: str) -> None:
        """Stream one answer. If it fails, report that and continue the conversation without it."""
        answered = False
        conversation = self._conversation
        try:
            for piece in conversation.say(text, **self._options.keywords() | self._more):
                answered = True
                typer.echo(piece, nl=False, color=True)  # else it would lose its own colour codes
                sys.stdout.flush()
            typer.echo()
            if not answered:
                note("the answer is empty: its first token was an end token")
            elif conversation.last is not None and conversation.last.finish_reason == "length":
                note(
                    f"the answer was cut after {len(conversation.last.tokens)} tokens; /set max_new_tokens N and "
                    "/again allow more"
                )
        except KeyboardInterrupt:  # ends only the answer
            typer.echo()
            kept = "partial answer stays in the conversation" if answered else "message is not answered"
            note(f"interrupted; the {kept}", "yellow")
        except LookaheadError as error:
            if answered:
                typer.echo()
            problem(f"{error} (/reset starts a new conversation)")


def messages_of_user() -> Iterator[str]:
    """The messages typed on a terminal, or else the lines of the input.

    Raises:
        SettingsError: the input is not UTF-8.
    """
    read = _terminal() if sys.stdin.isatty() else input
    while True:
        try:
            yield read()
        except KeyboardInterrupt:
            if read is input:
                raise
        except EOFError:
            return
        except UnicodeDecodeError:
            raise SettingsError("the input must be UTF-8 text; convert it first") from None


def _terminal() -> Callable[[], str]:
    """A prompt with line editing, whose history only its owner can read."""
    from prompt_toolkit import PromptSession
    from prompt_toolkit.history import FileHistory, History, InMemoryHistory
    from prompt_toolkit.key_binding import KeyBindings

    keys = KeyBindings()

    @keys.add("escape", "enter")
    def _(event: Any) -> None:
        event.current_buffer.insert_text("\n")

    history: History = InMemoryHistory()
    file = cache_folder() / "chat-history"
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        os.close(os.open(file, os.O_CREAT | os.O_APPEND, 0o600))
        history = FileHistory(str(file))
    except OSError:
        note(f"the history of messages ends with this chat, because {file} cannot be written")
    session: PromptSession[str] = PromptSession("> ", history=history, key_bindings=keys)
    return session.prompt
