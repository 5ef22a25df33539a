"""Locations of base tables, the choice of a model's table, and the start of building one.

A table belongs to a tokenizer, not to a model: it says which tokens follow which in text that models write, and they
write alike. All models with one tokenizer therefore share a table, in any size and dtype; a wrong guess costs a row
and never changes a token. The tables of this machine are in the user's cache folder: ``lookahead learn`` makes them,
and where there is none, another process counts the package's corpus (``lookahead.learning.corpus``), once for each
tokenizer, from when a model with it is loaded. The table of a part comes first, and text that is decoded before does
without.
"""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
import tempfile
import warnings
from contextlib import suppress
from functools import lru_cache
from pathlib import Path
from typing import IO, Any

from ...core import SettingsError
from ...core.errors import first_line
from ...model import Model
from ...records import cache_folder
from .sources.base_table import BaseTable, open_table

#: The text of models in which tables are counted.
CORPUS = Path(__file__).parents[2] / "learning" / "corpus.jsonl.xz"
#: What a process in the background adds to its nice value. Beside decoding on two cores of Linux 6.18, it still gets
#: 60 to 80 % of a core, and passes take 1.6 times as long. With SCHED_IDLE, it gets 12 %, and they take 1.1 times as
#: long (dev/LOG.md).
NICE = 16
#: The smallest vocabulary for which a table is built. Smaller ones split words into so many pieces that the corpus
#: would take minutes.
SMALLEST_VOCABULARY = 8000
#: A tokenizer's key is a digest of the tokens of this text, which tells vocabularies and rules apart: words, case,
#: numbers, spaces, punctuation, code and scripts. It must not change, because files are named by the key.
PROBE = """The quick brown fox jumps over 13 lazy dogs; isn't that "fun"? In 1984, it's 3.14159 or $2,000,000 (50%).
UPPERCASE words, CamelCase and snake_case_names, e-mail: someone@example.org, https://example.org/index.html?q=1&r=2
\tdef fibonacci(n: int) -> list[int]:\n        return [x ** 2 for x in range(n) if x % 2 == 0]  # a comment
    public static void main(String[] args) { System.out.println("Hello!\\n"); }\n\n\n   <div class="a">...</div>
SELECT name, COUNT(*) FROM users WHERE id <> 7 GROUP BY name;   -- two   or    more     spaces
Größe, façade, mañana, coração, Ærø, žluťoučký kůň, İstanbul, Việt Nam; «là-bas», „dort“, “there” – and — so…
Здравствуй, мир! Γειά σου Κόσμε. שלום עולם. مرحبا بالعالم. नमस्ते दुनिया। สวัสดีชาวโลก
你好，世界！我们今天学习数学。 こんにちは世界。 안녕하세요 세계.
1. one\n2. two\n- [ ] three\n* **four**\n| a | b |\n|---|---|\n∑ x² ≤ ∞, α → β, 25 °C, ½, 😀👍🏽 ✓"""

#: The tokenizers whose tables this process has tried to build, with the process that does; None if none was started.
_building: dict[str, subprocess.Popen[bytes] | None] = {}


def tokenizer_key(tokenizer: Any) -> str:
    """What tells a tokenizer from others, by how it splits text; "" if it cannot split it.

    Special tokens, which models with one vocabulary add in different numbers, make no difference.
    """
    try:
        ids = tokenizer(PROBE, add_special_tokens=False).input_ids
    except Exception:  # a tokenizer is anyone's code; without a key, no table is found
        return ""
    return hashlib.sha256(" ".join(map(str, ids)).encode()).hexdigest()[:16]


def key_of(model: Model) -> str:
    """The key of a model's tokenizer; "" if it is not known."""
    if model.tokenizer is None:
        return ""
    kept = model.state.setdefault("tokenizer", {})
    if "key" not in kept:
        kept["key"] = tokenizer_key(model.tokenizer)
    key: str = kept["key"]
    return key


def table_file(key: str) -> Path:
    """The file of the table that is made on this machine for a tokenizer."""
    return cache_folder() / "tables" / f"{key}.safetensors"


def read_table(key: str, vocabulary: int) -> BaseTable | None:
    """The table that was made on this machine for a tokenizer; None if there is none.

    Args:
        key: the tokenizer's key; "" if unknown.
        vocabulary: V of the model; 0 if unknown.

    Raises:
        SettingsError: the table cannot be used.
    """
    file = table_file(key)
    # Path.is_file raises PermissionError before Python 3.14 if the home folder is not accessible.
    return checked_table(file, vocabulary, key) if key and os.path.isfile(file) else None


def base_table_of(tokenizer: Any, key: str, vocabulary: int, decodes: bool = True) -> BaseTable | None:
    """The table of a tokenizer; warns if it cannot be used.

    If there is none, or one that was counted in an earlier corpus or in a part, another process starts to build one,
    and runs in idle time once text is decoded. Later calls return what it has saved.

    Args:
        tokenizer: of the model; None if unknown.
        key: its key.
        vocabulary: V of the model.
        decodes: whether text is about to be decoded, rather than a model loaded.
    """
    table = None
    try:
        table = read_table(key, vocabulary)
    except SettingsError as error:
        warn_once(str(error))
    if key and (table is None or not is_current(table)):
        if key not in _building:
            _building[key] = None
            missing = cannot_build(tokenizer)
            if missing:
                warn_once(missing)
            else:
                build_in_background(tokenizer, key)
        process = _building[key]
        if process is not None and decodes:
            run_when_idle(process)
    return table


def corpus_bytes() -> int:
    """The size of the corpus, which tells it from those of other versions of this package; 0 if it is missing."""
    return os.path.getsize(CORPUS) if os.path.isfile(CORPUS) else 0


def is_current(table: BaseTable) -> bool:
    """Whether a table was learned, or counted in the corpus of this package."""
    return table.learned > 0 or table.corpus == corpus_bytes()


def cannot_build(tokenizer: Any) -> str:
    """Why no table can be counted for a tokenizer; "" if one can."""
    known = tokenizer is not None and hasattr(type(tokenizer), "backend_tokenizer")
    if known and len(tokenizer) < SMALLEST_VOCABULARY:
        return f"a base table needs a vocabulary of at least {SMALLEST_VOCABULARY} tokens, this has {len(tokenizer)}"
    if not known or not hasattr(tokenizer.backend_tokenizer, "to_str"):
        return "a base table needs a tokenizer of the library tokenizers"
    return ""


def build_in_background(tokenizer: Any, key: str) -> None:
    """Start a process that builds a tokenizer's table. It goes on after this one has ended.

    Args:
        tokenizer: one for which ``cannot_build`` finds no reason.
        key: its key.
    """
    try:
        with tempfile.TemporaryFile() as file:
            file.write(tokenizer.backend_tokenizer.to_str().encode())
            file.seek(0)
            _building[key] = run_in_background(
                f"from lookahead.learning.corpus import main; main({key!r})", file
            )
    except Exception as error:  # a tokenizer is anyone's code
        warn_once(f"no base table can be built for this tokenizer ({first_line(error)})")


def run_in_background(program: str, stdin: IO[bytes] | int = subprocess.DEVNULL) -> subprocess.Popen[bytes]:
    """Run a Python program in another process of low priority, which an interrupt does not end.

    Raises:
        OSError: the process cannot be started.
    """
    low = f"import os, signal; signal.signal(signal.SIGINT, signal.SIG_IGN); hasattr(os, 'nice') and os.nice({NICE})"
    environment = os.environ | {"OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}
    command = [sys.executable, "-c", f"{low}; {program}"]
    return subprocess.Popen(command, stdin=stdin, stdout=subprocess.DEVNULL, env=environment)


def run_when_idle(process: subprocess.Popen[bytes]) -> None:
    """Let a process run only while no other one needs the processor, if the system can."""
    if sys.platform == "linux" and process.poll() is None:
        with suppress(OSError):  # the system refuses
            os.sched_setscheduler(process.pid, os.SCHED_IDLE, os.sched_param(0))


def is_building() -> bool:
    """Whether a process that this one has started builds a table."""
    return any(process is not None and process.poll() is None for process in _building.values())


def wait_for_tables(seconds: float | None = None) -> None:
    """Wait until the tables that this process has started to build are complete, or for so many seconds each."""
    for process in _building.values():
        if process is not None:
            with suppress(subprocess.TimeoutExpired):
                process.wait(seconds)


def checked_table(path: str | os.PathLike[str], vocabulary: int, key: str = "") -> BaseTable:
    """The table in a file.

    Args:
        path: the file.
        vocabulary: V of the model; 0 if unknown.
        key: of the model's tokenizer; "" if unknown.

    Raises:
        SettingsError: the file is not a base table, or it belongs to another tokenizer.
    """
    table = open_table(path)
    if vocabulary:
        table.check(vocabulary, key)
    return table


@lru_cache(maxsize=64)
def warn_once(message: str) -> None:
    """Warn once per process instead of once per sequence."""
    warnings.warn(f"{message}; drafting continues without a base table", UserWarning, stacklevel=2)
