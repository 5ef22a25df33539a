"""Draws the pictures of how-it-works.md from the code itself.

    python docs/draw.py            print the blocks
    python docs/draw.py --write    put them into docs/how-it-works.md and draw docs/images/step.svg

A test compares the page with what this draws, so the page cannot fall behind the code.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

from lookahead.core import NGramPool, TokenTree, verify
from lookahead.drafters import Window

HERE = Path(__file__).parent
PAGE = HERE / "how-it-works.md"
PROMPT = ["the", "cat", "sat", "on", "the", "mat", ".", "the", "dog", "sat", "on", "the", "rug", "."]
WORDS = sorted(set(PROMPT))
TEXT = [WORDS.index(word) for word in PROMPT]


def target(path: list[int]) -> int:
    """A model that wrote the prompt: after two words the word that followed them there, else the next one."""
    for back in (2, 1):
        tail = path[-back:]
        for i in range(len(TEXT) - back):
            if TEXT[i : i + back] == tail:
                return TEXT[i + back]
    return 0


def one_step() -> tuple[TokenTree, Window, NGramPool, list[int]]:
    """W = 3, N = 3, G = 2 after the prompt and the word "the"."""
    prefix = [*TEXT, WORDS.index("the")]
    pool = NGramPool(2)
    pool.add_text(TEXT, 3)
    guesses = iter([WORDS.index(w) for w in ("sat", "on", "mat", "rug", "dog", "the")])
    window = Window(3, 3, lambda: next(guesses))
    warm_up = TokenTree(prefix[-2])
    window.add_to(warm_up)
    window.advance(prefix[-2], [target(warm_up.path_tokens(n)) for n in window.newest_nodes()], frozenset())
    tree = TokenTree(prefix[-1])
    window.add_to(tree)
    for continuation in pool.get(prefix[-1]):
        tree.add_candidate(continuation)
    return tree, window, pool, prefix


def label(tree: TokenTree, node: int) -> str:
    return f"{node}:{WORDS[tree.tokens[node]]}"


def draw_tree(tree: TokenTree, window: Window) -> str:
    """The rows as an outline; what each row is for stands beside it."""
    newest = set(window.newest_nodes())
    lines: list[str] = []

    def walk(node: int, indent: str) -> None:
        use = "root" if node == 0 else "window" if not tree.needs_logits[node] else "candidate"
        if node in newest:
            use = "window, newest level"
        lines.append(f"{indent + label(tree, node):<24}T+{tree.depths[node]}  {use}")
        for child in range(len(tree)):
            if tree.parents[child] == node:
                walk(child, indent + "  ")

    walk(0, "")
    return "\n".join(lines)


def draw_mask(tree: TokenTree) -> str:
    """One line per row: x where it sees that column; every row also sees the whole prefix."""
    width = max(len(label(tree, n)) for n in range(len(tree)))
    head = " " * (width + 11) + " ".join(f"{n:>2}" for n in range(len(tree)))
    rows = [
        f"{label(tree, n):<{width}}  prefix x " + " ".join(f"{'x' if seen else '.':>2}" for seen in row)
        for n, row in enumerate(tree.mask())
    ]
    return "\n".join([head, *rows])


def draw_step() -> str:
    """What one forward pass gives: the walk, the commit and the new n-grams."""
    tree, window, _, prefix = one_step()
    path, tokens = verify(tree, lambda node: target(prefix[:-1] + tree.path_tokens(node)))
    new = [target(prefix[:-1] + tree.path_tokens(node)) for node in window.newest_nodes()]
    lines = ["text so far    ... " + " ".join(WORDS[t] for t in prefix[-5:])]
    for node, token in zip(path, tokens, strict=True):
        child = tree.child(node, token)
        found = "no row bears it: the bonus token" if child is None else f"row {child} bears it: descend"
        lines.append(
            f"verify         under row {label(tree, node):<8} the target says {WORDS[token]:<5} {found}"
        )
    lines.append(f"commit         keep rows {path}, drop the other {len(tree) - len(path)}")
    lines.append(
        "emit           " + " ".join(WORDS[t] for t in tokens) + f"   ({len(tokens)} tokens, one pass)"
    )
    for ngram in window.advance(prefix[-1], new, frozenset()):
        lines.append(
            f"observe        new n-gram {WORDS[ngram[0]]} -> " + " ".join(WORDS[t] for t in ngram[1:])
        )
    return "\n".join(lines)


def blocks() -> dict[str, str]:
    """Every drawn block of the page, by name."""
    tree, window, _, _ = one_step()
    return {"tree": draw_tree(tree, window), "mask": draw_mask(tree), "step": draw_step()}


def page(text: str) -> str:
    """The page with its drawn blocks up to date."""
    for name, drawn in blocks().items():
        pattern = rf"(<!-- drawn: {name} -->\n```text\n).*?(\n```)"
        text, count = re.subn(pattern, lambda m, drawn=drawn: m[1] + drawn + m[2], text, flags=re.S)
        if count != 1:
            raise SystemExit(f"error: {PAGE.name} must have one block <!-- drawn: {name} -->, found {count}")
    return text


def draw_svg(path: Path) -> None:
    """The mask as a picture."""
    import matplotlib

    matplotlib.use("Agg")
    matplotlib.rcParams["svg.hashsalt"] = "lookahead"
    import matplotlib.pyplot as plt

    tree, window, _, prefix = one_step()
    newest, size = set(window.newest_nodes()), len(tree)
    figure, axes = plt.subplots(figsize=(7, 4.6), layout="constrained")
    for row in range(size):
        for column in range(-3, size):
            seen = column < 0 or tree.ancestors[row] >> column & 1
            colour = "#E8E8E8" if not seen else "#999999" if column < 0 else "#0072B2"
            if column >= 0 and seen and tree.needs_logits[column] and column and column not in newest:
                colour = "#D55E00"
            axes.add_patch(plt.Rectangle((column, row), 0.92, 0.92, color=colour))
    names = [f"{label(tree, n)}  (T+{tree.depths[n]})" for n in range(size)]
    axes.set_yticks([n + 0.46 for n in range(size)], names)
    ticks = [*(WORDS[t] for t in prefix[-4:-1]), *(str(n) for n in range(size))]
    axes.set_xticks([n + 0.46 for n in range(-3, size)], ticks)
    axes.set_xlim(-3, size)
    axes.set_ylim(size, 0)
    axes.set_xlabel("sees: the committed prefix (grey), window rows (blue), candidate rows (orange)")
    axes.set_ylabel("row of the step")
    for side in axes.spines.values():
        side.set_visible(False)
    axes.tick_params(length=0)
    figure.savefig(path, metadata={"Date": None})


if __name__ == "__main__":
    if "--write" in sys.argv:
        PAGE.write_text(page(PAGE.read_text()))
        (HERE / "images").mkdir(exist_ok=True)
        draw_svg(HERE / "images" / "step.svg")
    else:
        for name, drawn in blocks().items():
            print(f"[{name}]\n{drawn}\n")
