"""The client examples in docs/guides/server.md, run against a server of a toy model."""

import json
import os
import re
import shutil
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

import lookahead
from serving import serving
from toy import save

PAGE = (Path(__file__).parent.parent / "docs" / "guides" / "server.md").read_text()
ADDRESS = "http://127.0.0.1:8000"
QUESTION = [{"role": "user", "content": "What is the capital of Japan?"}]


@pytest.fixture(scope="module")
def served(tmp_path_factory):
    folder = save(tmp_path_factory.mktemp("toy"), chat=True, max_position_embeddings=160)
    with serving(
        lookahead.load(folder, dtype="float32"), served_model_name="SmolLM2-135M-Instruct"
    ) as running:
        yield running


def answer_of(command, url, kind):
    """The output of a block of the page, run against this server."""
    (block,) = re.findall(rf"^```{kind}\n(.*?)^```", PAGE, re.S | re.M)
    assert ADDRESS in block
    done = subprocess.run(
        [*command, block.replace(ADDRESS, url)],
        env=os.environ | {"LITELLM_LOCAL_MODEL_COST_MAP": "True"},  # or it accesses the network at startup
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def plain(served):
    limit = 160  # a chat answer may fill the context
    return served.llm.generate(QUESTION, max_new_tokens=limit, drafter="off").text


@pytest.mark.parametrize("package", ["litellm", "langchain_openai"])
def test_a_client_in_python(served, package):
    if find_spec(package) is None:
        pytest.skip(f"{package} is not installed (pip install {package.replace('_', '-')})")
    shown = answer_of([sys.executable, "-c"], served.url, f"python no-run {package}")
    assert shown == f"{plain(served)}\n"


def test_the_curl_example_is_answered(served):
    if shutil.which("curl") is None:
        pytest.skip("no curl here (apt-get install curl)")
    answer = json.loads(answer_of(["bash", "-c"], served.url, "sh clients"))
    assert answer["choices"][0]["message"]["content"] == plain(served)


def test_the_guide_to_json_answers_in_json(served):
    page = (Path(__file__).parent.parent / "docs" / "guides" / "json-and-tools.md").read_text()
    (command,) = re.findall(r"^```sh\n(.*?)^```", page, re.S | re.M)
    assert ADDRESS in command
    done = subprocess.run(
        ["sh", "-c", command.replace(ADDRESS, served.url)], capture_output=True, text=True, timeout=60
    )
    answer = json.loads(done.stdout)
    assert answer["choices"][0]["message"]["content"].lstrip().startswith("{")
