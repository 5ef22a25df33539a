"""The structure of the library: who imports whom, what an import loads, sizes, names, and words that left."""

import ast
import io
import json
import re
import subprocess
import sys
import tokenize
from pathlib import Path

import pytest

import lookahead

SOURCE = Path(lookahead.__file__).parent
ROOT = Path(__file__).parent.parent
LARGEST_FILE = 300
#: Lines of each package. They may only fall, unless what a package does grows; the goal without the server is 13,000.
LARGEST = {
    "core": 1195, "drafters": 3059, "sampling.py": 300, "targets": 2660, "targets/cpu": 2510, "attention": 690,
    "hf": 510, "engine": 2030, "parallel": 1095, "bench": 1570, "cli": 1500, "testing.py": 210, "server": 2455,
}  # fmt: skip
FILES = sorted(SOURCE.rglob("*.py"))


def name_of(path):
    """a/b/__init__.py -> lookahead.a.b"""
    parts = path.relative_to(SOURCE.parent).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


MODULES = {name_of(path): path for path in FILES}


# ---------------------------------------------------------------------------------------------- imports


def imports_of(name, tree, modules):
    """Modules of ours that this one imports, anywhere in the file, except for type checkers only."""
    package = name if modules[name].name == "__init__.py" else name.rpartition(".")[0]
    found = set()

    def visit(node):
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            for child in node.orelse:
                visit(child)
            return
        if isinstance(node, ast.Import):
            found.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                parents = package.split(".")[: len(package.split(".")) - node.level + 1]
                base = ".".join([*parents, base] if base else parents)
            for alias in node.names:
                inner = f"{base}.{alias.name}"
                found.add(inner if inner in modules else base)
        for child in ast.iter_child_nodes(node):
            visit(child)

    visit(tree)
    return {one for one in found if one in modules and one != name}


def circles(graph):
    """Groups of modules that reach each other (Tarjan's strongly connected components)."""
    order, low, stack, groups = {}, {}, [], []

    def visit(name):
        order[name] = low[name] = len(order)
        stack.append(name)
        for other in graph[name]:
            if other not in order:
                visit(other)
            if other in stack:
                low[name] = min(low[name], low[other])
        if low[name] == order[name]:
            group = stack[stack.index(name) :]
            del stack[stack.index(name) :]
            if len(group) > 1:
                groups.append(sorted(group))

    for name in graph:
        if name not in order:
            visit(name)
    return groups


def test_no_import_circles():
    """Imports inside functions count; those under TYPE_CHECKING do not, since nothing runs them."""
    graph = {name: imports_of(name, ast.parse(path.read_text()), MODULES) for name, path in MODULES.items()}
    assert not circles(graph)


def test_a_circle_would_be_found():
    modules = {"a": Path("a/__init__.py"), "a.b": Path("a/b.py"), "a.c": Path("a/c.py")}
    texts = {"a": "", "a.b": "def f():\n    from .c import x", "a.c": "from . import b"}
    graph = {name: imports_of(name, ast.parse(text), modules) for name, text in texts.items()}
    assert circles(graph) == [["a.b", "a.c"]]
    texts["a.c"] = "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from .b import f"
    graph = {name: imports_of(name, ast.parse(text), modules) for name, text in texts.items()}
    assert circles(graph) == []


def test_import_contracts_see_every_import():
    """A module imported by its name at run time is one that no contract sees; only the lazy root may do it."""
    hidden = []
    for name, path in MODULES.items():
        words = {token.string for token in tokenize.generate_tokens(io.StringIO(path.read_text()).readline)}
        if words & {"import_module", "__import__"} and name != "lookahead":
            hidden.append(name)
    assert not hidden


def loaded_by(statement):
    code = f"{statement}\nimport sys, json\nprint(json.dumps(sorted(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    return set(json.loads(done.stdout))


@pytest.mark.parametrize(
    ("statement", "absent"),
    [
        ("import lookahead.core", {"torch", "numpy", "transformers", "typer", "rich", "matplotlib"}),
        ("import lookahead", {"torch", "numpy", "numba", "triton", "fastapi", "matplotlib", "scipy"}),
        ("import lookahead.drafters", {"torch", "numpy", "numba"}),
        ("import lookahead.testing", {"torch", "transformers"}),
        ("import lookahead.cli", {"torch", "matplotlib"}),
    ],
)
def test_what_an_import_loads(statement, absent):
    assert not loaded_by(statement) & absent


def test_the_core_is_the_standard_library_only():
    foreign = {
        name.split(".")[0]
        for name in loaded_by("import lookahead.core")
        if name.split(".")[0] not in sys.stdlib_module_names | {"lookahead", "__main__"}
    }
    # What an interpreter's site directory loads by itself at every start is not the core's doing.
    assert foreign <= {name.split(".")[0] for name in loaded_by("pass")}


# ---------------------------------------------------------------------------------------- names and sizes


def test_every_module_opens_with_its_contract():
    without = [name for name, path in MODULES.items() if not ast.get_docstring(ast.parse(path.read_text()))]
    assert not without, "these modules have no docstring"


def test_files_stay_small():
    sizes = {name: len(path.read_text().splitlines()) for name, path in MODULES.items()}
    large = {name: size for name, size in sizes.items() if size > LARGEST_FILE}
    assert not large, f"does each still have one purpose? at most {LARGEST_FILE} lines"


def test_packages_stay_small():
    sizes = dict.fromkeys(LARGEST, 0)
    for path in FILES:
        name = path.relative_to(SOURCE).as_posix()
        part = next(
            (part for part in ("targets/cpu", *LARGEST) if name == part or name.startswith(part + "/")), None
        )
        if part is not None:
            sizes[part] += len(path.read_text().splitlines())
    assert {part: size for part, size in sizes.items() if size > LARGEST[part]} == {}


# ------------------------------------------------------------------------------------- words that left

#: What is said instead -> pattern. Identifiers are read as words: ``naive_twin`` is "naive twin".
WORDS = {
    "loss budget": r"\bpurses?\b",
    "max regret": r"\bstakes?\b",
    "probe, or the first read": r"\b(a|the|first|every|each|cheap|next|paid) looks?\b(?! (at|up))|\bfirst look at\b",
    "cooldown": r"\b(rests|rested|resting|pauses?|paused|pausing)\b",
    "repetition check": r"\bpeek(s|ed|ing)?\b",
    "warm-up": r"\brehears(e|es|ed|al|ing)\b",
    "random tree": r"\bbush(es)?\b",
    "add (rows)": r"\bplant(s|ed|ing)?\b",
    "source agreement": r"\bvoices?\b",
    "credit assignment": r"\bwitness(es|ed)?\b",
    "backend, reference implementation": r"\btwins?\b",
    "weighted sum": r"\bweigh(s|ed|ing)?\b",
    "softmax": r"\bsoften(s|ed|ing)?\b",
    "buffer pool": r"\b(shelf|shelves)\b",
    "wake locks": r"\bbeds\b",
    "missing KV rows": r"\bdebts?\b|\bpay all\b",
    "fingerprint": r"\bsketch(es)?\b",
    "shutdown timeout": r"\bfarewell\b",
    "heartbeat": r"\bpulses?\b",
    "patched": r"\bin force\b",
    "overlap": r"\bmeanwhile\b",
    "probabilities": r"(?<!scaling[ -])\blaws?\b",
    "cpu": r"\blean\b",
    "package, module": r"\b(rooms|houses?)\b",
    "faster": r"\bsooner\b",
    "more expensive": r"\bdearer\b",
    "batch-invariant": r"\bbit for bit\b",
}
#: Names of ours that meant something of their own; as ordinary words they may stay in prose.
NAMES = {
    "meet": "barrier", "spread": "broadcast", "tell": "send", "hear": "receive", "SIDE": "key block",
    "TURN": "score block", "products": "gemm", "said": "token ids", "Said": "token ids", "law": "probabilities",
    "Subject": "model under test", "subject": "model under test", "Verdict": "Equivalence",
    "MOST": "what it limits", "Team": "RankGroup or ThreadPool",
}  # fmt: skip
#: (file or folder, word) -> why it may stay: the API of a library, or plain English with another meaning.
ALLOWED = {
    ("src/lookahead/targets/cpu", "pause"): "the processor's instruction of that name",
    ("CHANGELOG.md", "lean"): "an old name beside the one that took its place",
    ("CHANGELOG.md", "meanwhile"): "an old name beside the one that took its place",
    ("CHANGELOG.md", "plant"): "an old name beside the one that took its place",
}
TEXTS = [
    *FILES,
    *(ROOT / "benchmarks").rglob("*.py"),
    *(ROOT / "examples").rglob("*.py"),
    *(ROOT / "docs").glob("*.py"),
    *(ROOT / "docs").glob("*.md"),
    *ROOT.glob("*.md"),
]


def in_words(identifier):
    """``pay_all`` -> "pay all", ``NaiveTwin`` -> "naive twin"."""
    return re.sub(r"(?<=[a-z0-9])(?=[A-Z])", " ", identifier).replace("_", " ").lower()


def left_words(path, text):
    """(line, word, what is said instead) of every word in a file that has left the vocabulary."""
    pieces, names = [], []
    if path.suffix == ".py":
        for token in tokenize.generate_tokens(io.StringIO(text).readline):
            if token.type == tokenize.NAME:
                pieces.append((token.start[0], in_words(token.string)))
                names.append((token.start[0], token.string))
            elif token.type in (tokenize.COMMENT, tokenize.STRING):
                for number, line in enumerate(token.string.splitlines()):
                    pieces.append((token.start[0] + number, line.lower().replace("_", " ")))
    else:
        pieces = [(number, line.lower()) for number, line in enumerate(text.splitlines(), 1)]
    found = [
        (line, match[0], instead)
        for line, piece in pieces
        for instead, pattern in WORDS.items()
        for match in re.finditer(pattern, piece)
    ]
    found += [(line, name, NAMES[name]) for line, name in names if name in NAMES]
    stem = in_words(path.stem)
    found += [(0, stem, instead) for instead, pattern in WORDS.items() if re.search(pattern, stem)]
    return found


@pytest.mark.parametrize("path", TEXTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_words_that_left_do_not_come_back(path):
    file = str(path.relative_to(ROOT))
    found = [
        f"{file}:{line}: {word!r}, say {instead!r}"
        for line, word, instead in left_words(path, path.read_text())
        if not any(file.startswith(place) and word == allowed for place, allowed in ALLOWED)
    ]
    assert not found


def test_a_word_that_left_would_be_found():
    text = "class NaiveTwin:  # sooner\n    '''By the scaling law.'''\n    law = meet\n"
    words = [word for _, word, _ in left_words(Path("x.py"), text)]
    assert sorted(words) == ["law", "law", "meet", "sooner", "twin"]
    assert left_words(Path("lean.md"), "a rest of the text, weights, and a look at it") == [
        (0, "lean", "cpu")
    ]
