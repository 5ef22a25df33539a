"""The proposer in vLLM itself (``make test-vllm``). Each engine runs in its own process."""

import json
import os
import random
import re
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from importlib.metadata import distributions
from importlib.util import find_spec
from pathlib import Path

import pytest

import lookahead

if find_spec("vllm") is None:
    pytest.skip("vLLM is not installed; make test-vllm brings it", allow_module_level=True)

ROOT = Path(__file__).parents[1]
#: As in docs/engines.md.
OURS = json.loads(
    re.search(r"--speculative-config \\\n +'(.*)'", (ROOT / "docs" / "engines.md").read_text())[1]
)
ALWAYS = {"lookahead": "adaptive:rows=64:sources=suffix+logits+jacobi+corpus"}
#: In float32, rounding in a batch changes logits by less than two tokens differ.
ENGINE = {"model": str(lookahead.BUNDLED), "dtype": "float32", "max_model_len": 512}
ENVIRONMENT = os.environ | {
    "PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "src"), str(ROOT / "tests")]),
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_LOGGING_LEVEL": "ERROR",
}


def prompts(count):
    """Code-like prompts, which the tiny model continues, from one line to more than one chunk."""
    rng = random.Random(3)
    lines = [[rng.randrange(5, 900) for _ in range(12)] for _ in range(4)]
    return [
        [token for _ in range(1 + number) for token in rng.choice(lines)][number % 3 :]
        for number in range(count)
    ]


def run(speculative=None, additional=None, clients=4, **engine):
    more = engine | {"speculative_config": speculative, "additional_config": additional or {}}
    given = {"prompts": prompts(8), "tokens": 60, "clients": clients, "engine": ENGINE | more}
    command = [sys.executable, "-m", "benchmarks.vllm_run"]
    done = subprocess.run(
        command, input=json.dumps(given), capture_output=True, text=True, cwd=ROOT, env=ENVIRONMENT
    )
    found = [line for line in done.stdout.splitlines() if line.startswith("RESULT ")]
    assert found, done.stderr[-3000:]
    return json.loads(found[0].removeprefix("RESULT "))


def s_of(result):
    return sum(len(text) - 1 for text in result["texts"]) / sum(result["steps"])


@pytest.fixture(scope="module")
def plain():
    result = run()
    assert s_of(result) == 1
    return result


@pytest.fixture(scope="module")
def drafted():
    return run(OURS, ALWAYS)


def test_texts_are_plain_and_drafts_are_accepted(plain, drafted):
    assert drafted["texts"] == plain["texts"]
    assert s_of(drafted) > 1.3


def test_a_wrong_chain_keeps_the_texts_and_shows_in_the_acceptance(plain, drafted):
    wrong = run(OURS | {"model": "wrong_proposer.Wrong"}, ALWAYS)
    assert wrong["texts"] == plain["texts"]
    assert s_of(wrong) < 1 + (s_of(drafted) - 1) / 4


def test_prefixes_that_are_cached_and_prompts_in_chunks(plain):
    result = run(OURS, ALWAYS, enable_prefix_caching=True, max_num_batched_tokens=64)
    assert result["texts"] == plain["texts"]
    assert s_of(result) > 1.3


def test_requests_that_are_preempted(plain):
    """The KV cache has room for two of four sequences."""
    result = run(OURS, ALWAYS, num_gpu_blocks_override=3, max_model_len=256, block_size=128)
    assert result["preemptions"] > 0
    assert result["texts"] == plain["texts"]


def test_by_measured_times(plain):
    assert run(OURS)["texts"] == plain["texts"]


def test_logits_teach(plain, drafted):
    """Fewer tokens are accepted without logits, so the hook finds and reads them."""
    blind = run(OURS, {"lookahead": "adaptive:rows=64:sources=suffix+corpus"})
    assert blind["texts"] == plain["texts"]
    assert s_of(drafted) > s_of(blind)


def test_a_version_that_it_was_not_built_for_is_refused():
    code = (
        "import lookahead.integrations.vllm, vllm; lookahead.integrations.vllm.VERSIONS = '>=0.1,<0.2'; "
        "vllm.LLM(enforce_eager=True, **{engine})"
    ).replace("{engine}", repr(ENGINE | {"speculative_config": OURS}))
    environment = ENVIRONMENT | {"VLLM_ENABLE_V1_MULTIPROCESSING": "0"}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment)
    assert done.returncode != 0
    assert "lookahead.integrations.vllm supports vLLM >=0.1,<0.2, and" in done.stderr


def test_one_command_serves(plain):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    if any(distributions(name="vllm")):
        command = [str(Path(sys.executable).with_name("vllm")), "serve"]
    else:  # the command of vllm-cpu 0.32.0 looks for the distribution vllm and exits
        command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model"]
    command += [ENGINE["model"], "--port", str(port)]
    command += ["--host", "127.0.0.1", "--dtype", "float32", "--max-model-len", "512", "--enforce-eager"]
    command += ["--speculative-config", json.dumps(OURS), "--served-model-name", "tiny"]
    server = subprocess.Popen(command, env=ENVIRONMENT, start_new_session=True)
    try:
        url = f"http://127.0.0.1:{port}"
        for _ in range(300):
            time.sleep(0.5)
            assert server.poll() is None
            try:
                urllib.request.urlopen(f"{url}/health").close()
                break
            except OSError:
                pass
        body = {"model": "tiny", "prompt": prompts(8)[5], "max_tokens": 60, "temperature": 0}
        body |= {"return_token_ids": True}
        request = urllib.request.Request(
            f"{url}/v1/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
        )
        with urllib.request.urlopen(request, timeout=120) as reply:
            assert json.load(reply)["choices"][0]["token_ids"] == plain["texts"][5]
        with urllib.request.urlopen(f"{url}/metrics") as reply:
            assert b"vllm:spec_decode_num_drafts_total" in reply.read()
    finally:
        os.killpg(server.pid, signal.SIGTERM)
        server.wait(timeout=60)
