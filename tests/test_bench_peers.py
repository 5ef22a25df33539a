"""How peers are measured: memory, drafting modes, caches of prompts, and what README says of them."""

import sys
from contextlib import contextmanager

import pytest

from benchmarks import llamacpp_server, serve, servers, startup
from benchmarks.llamacpp_server import draft_options
from lookahead.bench import RunOptions
from lookahead.core import SettingsError


def test_the_memory_of_a_process_is_not_that_of_the_one_that_starts_it():
    held = bytearray(300_000_000)  # more than the processes below have
    small = startup.spent([sys.executable, "-I", "-S", "-c", "pass"]).memory
    large = startup.spent([sys.executable, "-I", "-S", "-c", "x = bytearray(b'1') * 200_000_000"]).memory
    assert len(held) == 300_000_000
    assert small < 50
    assert 200 < large < 250


def test_mapped_weights_are_left_out(tmp_path):
    path = tmp_path / "model.panels"
    path.write_bytes(bytes(100_000_000))
    code = f"import mmap, time; f = open({str(path)!r}, 'rb'); m = mmap.mmap(f.fileno(), 0, access=1)\n"
    code += "x = sum(m[::4096]); time.sleep(0.3)"
    used = startup.spent([sys.executable, "-I", "-S", "-c", code], sampled=True)
    assert used.memory > 100
    assert 1 < used.unmapped < 50


def test_the_time_until_something_is_written():
    code = "import time; print('a', flush=True); time.sleep(0.5)"
    used = startup.spent([sys.executable, "-I", "-S", "-c", code])
    assert used.first + 0.4 < used.seconds


def test_the_time_of_a_process_is_its_own():
    used = startup.spent([sys.executable, "-I", "-S", "-c", "import time; time.sleep(0.3)"])
    assert 0.3 <= used.seconds < 1.5


def test_a_process_that_fails():
    with pytest.raises(SettingsError, match="ended with status 3"):
        startup.spent([sys.executable, "-I", "-S", "-c", "raise SystemExit(3)"])


def test_the_environment_of_a_process():
    code = "import os; raise SystemExit(0 if os.environ['MARK'] == 'x' and 'PATH' in os.environ else 4)"
    startup.spent([sys.executable, "-I", "-S", "-c", code], {"MARK": "x"})


def test_options_of_llama_servers_modes():
    assert draft_options("ngram-mod") == ["--spec-type", "ngram-mod"]
    simple = ["--spec-type", "ngram-simple", "--spec-ngram-simple-size-n", "3"]
    assert draft_options("ngram-simple", "3,8") == [*simple, "--spec-ngram-simple-size-m", "8"]
    assert draft_options("ngram-mod", "6,2,8")[-2:] == ["--spec-ngram-mod-n-max", "8"]
    for mode, numbers in (("ngram-mod", "6,8"), ("ngram-cache", "3")):
        with pytest.raises(SettingsError, match=f"{mode} of llama-server must have"):
            draft_options(mode, numbers)


def test_a_server_with_drafts_answers_after_a_request_that_does_not_count(monkeypatch):
    started, asked = [], []

    @contextmanager
    def start(*given, more):
        started.append((*given, *more))
        yield "http://127.0.0.1:1"

    def complete(client, prompt, options):
        asked.append((list(prompt), options.max_new_tokens))
        return asked[-1]

    monkeypatch.setattr(llamacpp_server, "started_llamacpp", start)
    monkeypatch.setattr(llamacpp_server, "complete", complete)
    prompts = [list(range(20)), [1, 2]]
    found = llamacpp_server.answers("program", "file", 2, "ngram-simple:3,8", prompts, RunOptions(64))
    assert found == [(prompt, 64) for prompt in prompts] == asked[1:]
    assert asked[0] == (list(range(8)), 8)
    (words,) = started
    assert words[:4] == ("program", "file", 2, 4096)
    assert words[4:] == tuple(draft_options("ngram-simple", "3,8"))


def test_servers_that_are_started_here_keep_no_prompts(monkeypatch, tmp_path):
    commands = []

    @contextmanager
    def running(words, path):
        commands.append(words)
        yield "address"

    for module in (serve, servers):
        monkeypatch.setattr(module, "running", running)
    monkeypatch.setattr(serve, "build_of", lambda program: "a build")
    monkeypatch.setattr(serve, "measure", lambda *given: given)
    (tmp_path / "llama-server").touch()
    words = ["--against", "llamacpp:x.gguf", "--bin", str(tmp_path), "--clients", "2"]
    (*_, other), asked, _, _ = serve._measure(serve.parser().parse_args(words))
    with other.start(2):
        pass
    ours, theirs = commands
    assert "--prefix-cache=0" in ours
    assert theirs[-2:] == ["--cache-ram", "0"]
    assert " without drafts, " in other.about
    assert theirs[theirs.index("--ctx-size") + 1] == str(2 * serve.CONTEXT)
    with pytest.raises(
        SettingsError, match=r"needs llama-server in the folder that --bin names, got --bin None"
    ):
        serve._measure(serve.parser().parse_args(words[:2]))
    with pytest.raises(SettingsError, match=r"needs llama-server .*, got --bin .*empty"):
        serve._measure(serve.parser().parse_args([*words[:2], "--bin", str(tmp_path / "empty")]))
    assert other.extra == {"cache_prompt": False}
    assert asked.startswith("Prompts: 32 of stdlib, functions of Python's standard library to complete")
    assert "at most 64 new tokens" in asked


def record(method, prompt_tokens, repeat, seconds):
    tokens = {"new_tokens": 11, "prefill_tokens": 1, "decode_seconds": seconds}
    return {"method": method, "prompt_tokens": prompt_tokens, "repeat": repeat, **tokens}
