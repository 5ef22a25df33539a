"""Shared test setup: no network, no advice from transformers, and a fixture that breaks verification."""

import gc
import importlib
import importlib.util
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from fnmatch import fnmatch
from importlib.metadata import version
from pathlib import Path

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")

import pytest
from hypothesis import HealthCheck, settings

# Imported modules are never freed, and each garbage collection spends a quarter of a second visiting them.
# It is off until the tests are collected, and ignores these objects afterwards (pytest_collection_finish).
gc.disable()

# A shell without job control starts background jobs with SIGINT ignored, and tests send it.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

# No test may depend on how busy the machine is.
settings.register_profile("any machine", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("any machine")

#: Whether the tests run without torch (make test-light): then only files with the mark ``light`` are collected.
LIGHT = importlib.util.find_spec("torch") is None
if not LIGHT:
    import torch

    # Without a GPU, the attention kernel runs in Triton's interpreter, which must be chosen before the import.
    if not torch.cuda.is_available():
        os.environ.setdefault("TRITON_INTERPRET", "1")


#: Tests that `make test-slow` runs and `make test` leaves out, because they take half of all processor time: whole
#: processes, real models, model families, and GPU kernels, which are interpreted here. The longest come first
#: (``pytest --durations=20`` lists them). Others have the mark ``slow`` where they are defined.
SLOW = (
    "test_gpu_check::*",
    "test_lookahead_budget::test_at_64_rows*",
    "test_attention_compile::test_the_kernels*",
    "test_cpu_widths::test_each_width*",
    "test_fuzz::*",
    "test_equivalence::test_the_real_model*",
    "test_engine::test_a_model_in_int8*",
    "test_cpu_target::test_without_numbas_compiler*",
    "test_soak::*",
    "test_results::test_pages_do_not_use*",
    "test_llm_plugin::*",
    "test_server_stress::*",
    "test_server_smollm2::*",
    "test_bench_lm_eval::*",
    "test_parallel*::*",
    "test_gguf_damage::*",
    "test_families::*",
    "test_lora::*",
    "test_train_head::*",
    "test_attention::*",
    "test_attention_exact::*",
    "test_batch_rows::*",
    "test_cuda_graphs::*",
    "test_freed_slots::*",
    "test_docs::test_python_blocks*",
    "test_docs::test_commands_of_pages_run*",
    "test_docs::test_the_notebook*",
    "test_paper::test_a_command_writes*",
    "test_paper::test_only_first_turns*",
    "test_wheel::*",
    "test_gguf_tokenizer::test_tokens_of_smollm2*",
    "test_adaptive_tune::test_a_gpu_reads*",
    "test_adaptive_tune::test_several_passes_of_exact*",
    "test_adaptive_tune::test_the_cost_of_drafting_is*",
    "test_targets::test_a_rotary_base*",
    "test_bench_counting::*",
    "test_gguf_header::test_a_real_file*",
    "test_learn::*",
    "test_bench_peers::*",
    "test_bench_drafters::*",
    "test_bench_workloads::test_the_standard_library*",
    # Of these, one size, path, method or family stays in `make test`, of each kind.
    "test_bench_results::test_[bst]*",
    "test_equivalence::test_a_*30*False*",
    "test_cpu_batch_invariance::test_rows_of_odd_sizes*(576*",
    "test_cpu_batch_invariance::test_rows_of_odd_sizes*(174*",
    "test_cpu_batch_invariance::test_text_in_bf16*jacobi*",
    "test_cpu_batch_invariance::test_text_in_bf16*prompt-lookup*",
    "test_exact::test_exact_mode_gives*",
    "test_exact::test_captured_texts*",
    "test_exact::test_rows_have*mistral*",
    "test_adaptive_rows::test_rows_are*on_every_path*exact*",
    "test_adaptive_rows::test_rows_are*on_every_path*batch-rows*",
    "test_adaptive_rows::test_rows_are*on_every_path*transformers*",
    "test_attention_hook::test_same_text*-*",
    "test_cli::test_verify_compares_rows*False*",
    "test_cpu_target::test_text_is_that_of_plain_decoding*prompt-lookup*",
    "test_cpu_target::test_what_does_not_apply*dropout-in*",
    "test_cpu_batch_invariance::test_a_trees*fp32*",
    "test_hf::test_a_light_head*llama-1*",
    "test_hf::test_a_light_head*phi*",
    "test_gguf_files::test_transformers_reads*qwen*",
    "test_gguf_files::test_transformers_reads*gemma*",
    "test_machine_code::test_packing*Q[456]_[01]*",
    "test_machine_code::test_packing*Q[56]_K*",
    "test_machine_code::test_packing*F32*",
    "test_paper::test_the_joint_distribution*",
    "test_paper::test_rouge*",
    "test_paper::test_an_interrupt*",
    "test_paper::test_end_to_end*",
    "test_same_texts::test_texts_of_*bfloat16*",
    "test_same_texts::test_texts_of_*exact-attention*",
    "test_same_texts::test_texts_of_*plain*",
    # These also run in make test-light.
    "test_hub_names::test_a_model_by_name*",
    "test_hub_names::test_names_that_cannot_be_loaded*owner/[mgsn]*",
    "test_light::test_generate*F*",
    "test_light::test_[!g]*",
)


#: Names the folder of the default model's base table in the environment of the workers.
TABLES = "LOOKAHEAD_TEST_TABLES"


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_setupnodes(config, specs):
    """Before the workers start, build the kernels if they must be built, and count the default model's base table.

    Counted while the workers keep all cores busy, in idle time, it would take minutes.
    """
    source = str(Path(__file__).parents[1] / "src")
    environment = os.environ | {"PYTHONPATH": source}
    subprocess.run(
        [sys.executable, "-c", "from lookahead import machine_code as m; m.load()"], env=environment
    )
    os.environ[TABLES] = tempfile.mkdtemp()
    count = "import lookahead; from lookahead.drafters.adaptive import base_files; lookahead.load(); "
    count += "base_files.wait_for_tables()"
    subprocess.run([sys.executable, "-c", count], env=environment | {"XDG_CACHE_HOME": os.environ[TABLES]})


#: Whether the reference for the Gemma 2 tests is wrong.
IGNORES_SOFT_CAPS = not LIGHT and tuple(map(int, version("transformers").split(".")[:2])) < (5, 21)


def pytest_ignore_collect(collection_path):
    """Without torch, leave out files whose tests need it."""
    python = collection_path.suffix == ".py"
    return True if LIGHT and python and "pytest.mark.light" not in collection_path.read_text() else None


def is_named(item, pattern):
    return fnmatch(f"{item.path.stem}::{item.name}", pattern)


def pytest_collection_modifyitems(items):
    order = {}
    for item in items:
        order[item] = next((n for n, each in enumerate(SLOW) if is_named(item, each)), len(SLOW))
        if order[item] < len(SLOW):
            item.add_marker(pytest.mark.slow)
        if IGNORES_SOFT_CAPS and item.path.stem == "test_cpu_target" and "[gemma2" in item.name:
            item.add_marker(
                pytest.mark.skip(reason="transformers before 5.21 ignores Gemma 2's soft caps with sdpa")
            )
    items.sort(key=order.get)  # so that no worker is left alone with a long one


def pytest_collection_finish():
    gc.freeze()
    gc.enable()


def pytest_unconfigure():
    gc.unfreeze()  # some modules warn about objects never freed
    if TABLES in os.environ and "PYTEST_XDIST_WORKER" not in os.environ:
        shutil.rmtree(os.environ[TABLES], ignore_errors=True)


@pytest.fixture(scope="session", autouse=True)
def own_cache_folder(tmp_path_factory):
    """Keep the tests' step times out of the user's cache."""
    with pytest.MonkeyPatch.context() as patch:
        cache = tmp_path_factory.mktemp("cache")
        patch.setenv("XDG_CACHE_HOME", str(cache))
        counted = Path(os.environ.get(TABLES, os.devnull), "lookahead-decoding", "tables")
        if counted.is_dir():
            shutil.copytree(counted, cache / "lookahead-decoding" / "tables")
        yield


@pytest.fixture(scope="session", autouse=True)
def assumed_curves():
    """Give models the assumed cost curve, which does not depend on how busy the machine is."""
    import assumed_curves

    assumed_curves.use()


@pytest.fixture
def measured_curves(monkeypatch):
    """Measure the cost curves of models."""
    import assumed_curves
    from lookahead.drafters.adaptive import model_curves

    for name, real in assumed_curves.REAL.items():
        monkeypatch.setattr(model_curves, name, real)


@pytest.fixture(scope="session")
def toy_plain(tmp_path_factory):
    """A folder with a tiny model and its tokenizer. Tests that change the files make their own (``toy.save``)."""
    from toy import save

    return save(tmp_path_factory.mktemp("plain") / "toy")


@pytest.fixture(scope="session")
def toy_chat(tmp_path_factory):
    """The same, with a chat template."""
    from toy import save

    return save(tmp_path_factory.mktemp("chat") / "toy", chat=True)


@pytest.fixture(scope="session")
def tiny_gguf(tmp_path_factory):
    """Paths of GGUF files with random weights, by architecture and block types; each is written once.

    Tests that change a file copy it.
    """
    from gguf_files import write_gguf

    folder, written = tmp_path_factory.mktemp("gguf"), {}

    def file(architecture, types="Q8_0"):
        if (architecture, types) not in written:
            written[architecture, types] = path = folder / f"{len(written)}.gguf"
            write_gguf(path, architecture, types)
        return written[architecture, types]

    return file


@pytest.fixture
def accept_a_wrong_node(monkeypatch):
    """Break verification on purpose: from the third step on, accept a drafted token unverified.

    An exactness test that still passes with this fixture can never fail.
    """
    loop = importlib.import_module("lookahead.core.loop")
    honest, steps = loop.verify, []

    def broken(tree, choose, finished=None):
        steps.append(1)
        wrong = next((n for n in range(1, len(tree)) if tree.parents[n] == 0 and tree.needs_logits[n]), None)
        if len(steps) < 3 or wrong is None:
            return honest(tree, choose, finished)
        return honest(tree, lambda node: choose(node) if node else _wrong(tree, wrong, choose), finished)

    def _wrong(tree, wrong, choose):
        choose(0)
        return tree.tokens[wrong]

    monkeypatch.setattr(loop, "verify", broken)
    return steps


@pytest.fixture(scope="session")
def wheel(tmp_path_factory):
    """The wheel that users install."""
    folder = tmp_path_factory.mktemp("wheel")
    command = [sys.executable, "-m", "hatchling", "build", "--target", "wheel", "--directory", str(folder)]
    subprocess.run(command, cwd=Path(__file__).parent.parent, check=True, capture_output=True)
    (built,) = folder.glob("*.whl")
    return built


@pytest.fixture(scope="session")
def openai():
    """The client library, imported only where used because the import takes a second per process."""
    return importlib.import_module("openai")


@pytest.fixture(scope="module")
def browser():
    """Headless Chromium, started once per file, if it and playwright are installed.

    Playwright keeps an event loop running in this thread, and tests in other files start their own loops.
    """
    program = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
    if program is None:
        pytest.skip("no Chromium here (apt-get install chromium)")
    playwright = pytest.importorskip("playwright.sync_api")
    with playwright.sync_playwright() as driver:
        started = driver.chromium.launch(executable_path=program, args=["--no-sandbox"], timeout=120_000)
        yield started
        started.close()
