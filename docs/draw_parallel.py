"""Draws the pictures of parallel.md (in both languages) and attention.md from the code itself.

    python docs/draw_parallel.py            print the blocks
    python docs/draw_parallel.py --write    put them into the pages and draw docs/images/shards.svg and shards.zh.svg

A test compares the pages with what this draws, so they cannot fall behind the code.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

from lookahead.core import TokenTree
from lookahead.drafters import Window
from lookahead.parallel.executor import below
from lookahead.parallel.shard import Shards, shard

HERE = Path(__file__).parent
PAGES = ("parallel.md", "zh/parallel.md", "attention.md")
RANKS = 3
COLOURS = ("#0072B2", "#D55E00", "#009E73")


def one_tree() -> tuple[TokenTree, list[str]]:
    """W = 4, N = 3 and two candidates of one key; names by use: a b for window levels, c d for candidates."""
    numbers = iter(range(1, 99))
    window = Window(4, 3, lambda: next(numbers))
    window.advance(0, [next(numbers) for _ in range(window.columns)], frozenset())
    tree = TokenTree(0)
    window.add_to(tree)
    names = ["x", *(f"a{i}" for i in range(1, 4)), *(f"b{i}" for i in range(4))]
    for letter in "cd":
        tree.add_candidate([next(numbers), next(numbers)])
        names += [f"{letter}1", f"{letter}2"]
    assert len(names) == len(tree)
    return tree, names


def draw_tree(tree: TokenTree, names: list[str], cut: Shards) -> str:
    """An outline; beside each row the ranks that evaluate it, and whose logits count."""
    lines: list[str] = []

    def walk(node: int, indent: str) -> None:
        ranks = " ".join(str(r) if node in rows else "." for r, rows in enumerate(cut.rows))
        owner = f"rank {cut.owner[node]}" if cut.owner[node] >= 0 else "not needed"
        lines.append(f"{indent + names[node]:<14}T+{tree.depths[node]}   {ranks}   {owner}")
        for child in range(len(tree)):
            if tree.parents[child] == node:
                walk(child, indent + "  ")

    walk(0, "")
    widths = ", ".join(str(len(rows)) for rows in cut.rows)
    return "\n".join(
        ["row           place ranks  logits", *lines, f"{len(tree)} rows; the ranks evaluate {widths}"]
    )


def draw_mask(tree: TokenTree, names: list[str]) -> str:
    """One line per row: x where it sees that column."""
    rows = zip(names, tree.mask(), strict=True)
    lines = [f"{name:<4}" + " ".join("x" if seen else "." for seen in row) for name, row in rows]
    return "\n".join(lines)


def draw_missing() -> str:
    """The next step of a rank that lacks two accepted rows."""
    part = TokenTree(9)
    part.add_candidate([8, 7])
    tree = below([5, 6], part)
    names = ["c1 (missing)", "c2 (missing)", "new root", "its shard", "its shard"]
    lines = ["tree          parents " + " ".join(f"{p:>2}" for p in tree.parents)]
    lines += [
        f"row {row}  {names[row]:<12} T{depth - 2:+d}".replace("T+0", "T")
        for row, depth in enumerate(tree.depths)
    ]
    return "\n".join(lines)


def draw_words(tree: TokenTree, names: list[str]) -> str:
    """Ancestor bits as the kernel gets them: row 0 is the lowest bit."""
    from lookahead.hf.attention import pack_bits

    words = pack_bits([tree.ancestors], len(tree))[0, :, 0].tolist()
    return "\n".join(f"{name:<4}{word:0{len(tree)}b}" for name, word in zip(names, words, strict=True))


def blocks() -> dict[str, str]:
    """Every drawn block, by name."""
    tree, names = one_tree()
    cut = shard(tree, RANKS)
    return {
        "shards": draw_tree(tree, names, cut),
        "mask": draw_mask(tree.subtree(cut.rows[1]), [names[n] for n in cut.rows[1]]),
        "missing": draw_missing(),
        "words": draw_words(tree, names),
    }


def page(text: str) -> str:
    """A page with its drawn blocks up to date."""
    for name, drawn in blocks().items():
        pattern = rf"(<!-- drawn: {name} -->\n```text\n).*?(\n```)"
        text = re.sub(pattern, lambda m, drawn=drawn: m[1] + drawn + m[2], text, flags=re.S)
    return text


#: Words below the picture.
LEGEND = (
    "row (left) sees column (below); blue, orange, green: rows whose logits rank 0, 1, 2 answer for; "
    "grey: ancestors, evaluated where they are needed"
)
#: Patterns in the picture -> the Chinese words.
CHINESE = {
    re.escape(
        LEGEND
    ): "左侧的行可见下方的列；蓝、橙、绿：由 rank 0、1、2 给出 logits 的行；灰：祖先，在需要之处计算",
    r"one device: (\d+) rows": r"单个设备：\1 行",
    r": (\d+) rows": r"：\1 行",
}


def draw_svg(path: Path, chinese: bool = False) -> None:
    """The mask of the whole tree and of each shard; Chinese words stay text, in a font of the reader's."""
    import matplotlib

    matplotlib.use("Agg")
    matplotlib.rcParams["svg.hashsalt"] = "lookahead"
    matplotlib.rcParams["svg.fonttype"] = "none" if chinese else "path"
    import matplotlib.pyplot as plt

    tree, names = one_tree()
    cut = shard(tree, RANKS)
    figure, axes = plt.subplots(
        1, 1 + RANKS, figsize=(10, 4), layout="constrained", width_ratios=[len(tree), *map(len, cut.rows)]
    )
    panels = [("one device", list(range(len(tree))))]
    panels += [(f"rank {rank}", rows) for rank, rows in enumerate(cut.rows)]
    for ax, (title, rows) in zip(axes, panels, strict=True):
        size = len(rows)
        for i, row in enumerate(rows):
            for j, column in enumerate(rows):
                seen = tree.ancestors[row] >> column & 1
                owner = cut.owner[row]
                colour = "#E8E8E8" if not seen else "#999999" if owner < 0 else COLOURS[owner]
                if seen and owner >= 0 and not title.endswith(str(owner)) and title != "one device":
                    colour = "#999999"
                ax.add_patch(plt.Rectangle((j, i), 0.92, 0.92, color=colour))
        ax.set_xticks([n + 0.46 for n in range(size)], [names[n] for n in rows], fontsize=8, rotation=90)
        ax.set_yticks([n + 0.46 for n in range(size)], [names[n] for n in rows], fontsize=8)
        ax.set_xlim(0, size)
        ax.set_ylim(size, 0)
        ax.set_aspect("equal")
        ax.set_title(f"{title}: {size} rows", fontsize=10)
        for side in ax.spines.values():
            side.set_visible(False)
        ax.tick_params(length=0)
    figure.supxlabel(LEGEND, fontsize=8)
    figure.savefig(path, metadata={"Date": None})
    if chinese:
        text = path.read_text()
        for english, words in CHINESE.items():
            text = re.sub(english, words, text)
        path.write_text(text)


if __name__ == "__main__":
    if "--write" in sys.argv:
        for name in PAGES:
            (HERE / name).write_text(page((HERE / name).read_text()))
        draw_svg(HERE / "images" / "shards.svg")
        draw_svg(HERE / "images" / "shards.zh.svg", chinese=True)
    else:
        for name, drawn in blocks().items():
            print(f"[{name}]\n{drawn}\n")
