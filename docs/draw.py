"""Draws the pictures of the lesson from the code itself, from committed traces and from committed figures.

    python docs/draw.py            print the blocks
    python docs/draw.py --write    put them into the pages of docs/lesson, and draw the images and the moving pages

The traces in docs/traces are of SmolLM2-135M-Instruct in Q4_1 (the default model), 96 tokens, greedy:

    lookahead generate --prompt-file PROMPT --drafter lookahead:5,4,5:pool_from_prompt=false:pool_from_output=false \
        --max-new-tokens 96 --trace docs/traces/window.jsonl

likewise jacobi:block_size=8, the default (adaptive.jsonl, with an empty cache folder, so that the cost of rows is the
assumed one) and, with 28 tokens, adaptive:rows=16 (rows.jsonl). The prompt is a chat, which ``prompt()`` gives. The
picture of a completion is of the second prompt of ``lookahead demo``, with the default drafter and 128 tokens:

    lookahead generate --chat --prompt-file src/lookahead/cli/demo_prompts/2-write.txt \
        --trace docs/traces/completion.jsonl

A test compares pages and images with what this draws, so they cannot fall behind the code.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterable, Sequence
from functools import partial
from html import escape
from pathlib import Path
from textwrap import wrap
from typing import Any

import numpy as np

from lookahead.cli.demo import PROMPTS
from lookahead.cli.show import page_of
from lookahead.core import TokenTree, verify
from lookahead.drafters import NGramPool, Window
from lookahead.drafters.adaptive.cost import CostCurve
from lookahead.drafters.adaptive.sources import base_table
from lookahead.learning.table import Places, levels_of, trie_of
from lookahead.learning.text_parts import Text
from lookahead.trace import read_trace

HERE = Path(__file__).parent
PROMPT = ["the", "cat", "sat", "on", "the", "mat", ".", "the", "dog", "sat", "on", "the", "rug", "."]
WORDS = sorted(set(PROMPT))
TEXT = [WORDS.index(word) for word in PROMPT]
#: Steps of docs/traces/window.jsonl that the chapter on the window shows, and a later one that accepts their n-gram.
SHOWN, ACCEPTING = (5, 6, 7), 16
#: The step of docs/traces/rows.jsonl that shows the rule for rows.
STEP_OF_RULE = 6
COLOURS = ("#1f5fbf", "#9a4a00", "#0d6e5f", "#8a2b77", "#4c6300")
DARK_COLOURS = ("#8ab4ff", "#f0a860", "#5fd0bb", "#e59ad4", "#b5cf5c")


# ------------------------------------------------------------------ a step on a toy model


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


def draw_tree() -> str:
    """The rows as an outline; what each row is for stands beside it."""
    tree, window, _, _ = one_step()
    lines: list[str] = []

    def walk(node: int, indent: str) -> None:
        levels = [str(number) for number, rows in enumerate(window.nodes()) if node in rows]
        use = f"window, level {' and '.join(levels)}" if levels else "candidate"
        use = use if node else "root"
        lines.append(f"{indent + label(tree, node):<24}T+{tree.depths[node]}  {use}")
        for child in range(len(tree)):
            if tree.parents[child] == node:
                walk(child, indent + "  ")

    walk(0, "")
    return "\n".join(lines)


def draw_mask() -> str:
    """One line per row: x where it sees that column; every row also sees the whole prefix."""
    tree, _, _, _ = one_step()
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
        found = "no child has it: the bonus token" if child is None else f"row {child} has it: descend"
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


# ------------------------------------------------------------------ real steps, from traces and figures


def steps_of(name: str) -> tuple[list[dict[str, Any]], dict[int, str]]:
    """The steps of a committed trace, and the text of each token."""
    records = [json.loads(line) for line in read_trace(HERE / "traces" / f"{name}.jsonl").lines]
    texts = {int(token): text for record in records for token, text in record.get("texts", {}).items()}
    return [record for record in records if "step" in record], texts


def visible(text: str) -> str:
    return text.replace("\n", "⏎").replace(" ", "␣")


def prompt() -> str:
    """The text of the traces' prompt."""
    trace = read_trace(HERE / "traces" / "window.jsonl")
    return "".join(trace.header["texts"][str(token)] for token in trace.header["prompt"])


#: {rows: milliseconds} of a step of SmolLM2 in bf16 behind 128 tokens on the compiled CPU path: two cores of an Intel
#: Xeon with AMX (`python -m benchmarks.step`, in dev/LOG.md). Of other files, the records say it.
BF16_MS = {1: 13.518, 8: 16.559, 16: 16.485, 32: 18.903, 64: 24.728}


def costs() -> dict[str, dict[int, float]]:
    """Model -> rows -> milliseconds of a step."""
    lines = json.loads((HERE / "results" / "packed-step.json").read_text())["figures"]
    found = {line["type"]: {int(rows): each["ours"] for rows, each in line["t"].items()} for line in lines}
    return {"1.5B, 4 bits": found["1.5B"], "135M, 4 bits": found["own"], "135M, bf16, AMX": BF16_MS}


def draw_costs() -> str:
    """Milliseconds of a step, and how many times those of one row."""
    named = costs()
    lines = ["rows" + "".join(f"{name:>22}" for name in named)]
    for rows in (1, 2, 4, 8, 16, 32, 64):
        cells = [
            f"{each[rows]:.1f} ms {each[rows] / each[1]:>7.2f} x" if rows in each else "-"
            for each in named.values()
        ]
        lines.append(f"{rows:>4}" + "".join(f"{cell:>22}" for cell in cells))
    return "\n".join(lines)


def draw_jacobi() -> str:
    """The iterates of one block: the last token, then the guesses that each step evaluates."""
    steps, texts = steps_of("jacobi")
    lines = []
    for record in steps[17:25]:
        cells = [visible(texts[token]) for token in record["tree"]]
        done = " ".join(visible(texts[token]) for token in record["tokens"])
        lines.append(f"step {record['step']:<4}" + "".join(f"{cell[:11]:<12}" for cell in cells).rstrip())
        lines.append(f"{'':<9}gives {done}")
    return "\n".join(lines)


def draw_found() -> str:
    """How the candidate that a shown step accepts came into the pool."""
    steps, texts = steps_of("window")
    record = steps[ACCEPTING]
    accepted = [record["tree"][row] for row in record["path"]]
    first = next(earlier["step"] for earlier in steps if accepted in earlier.get("ngrams", []))
    say = " ".join(visible(texts[token]) for token in accepted)
    return (
        f"step {first:<3} the n-gram {say} leaves the window and enters the pool\n"
        f"step {record['step']:<3} the last token is {visible(texts[accepted[0]])}: the pool offers it, verification "
        f"accepts {len(accepted) - 1} tokens\n"
        f"         and adds one of its own: {len(record['tokens'])} tokens from one pass"
    )


def draw_rows() -> str:
    """F(k), c(k) and what the rule maximises, of one step of the trace with 16 rows."""
    record = steps_of("rows")[0][STEP_OF_RULE]
    best = sorted(record["probabilities"], reverse=True)
    times = costs()["1.5B, 4 bits"]
    curve = CostCurve({0: {rows: ms / times[1] for rows, ms in times.items()}})
    lines = ["rows k    F(k)    c(k)    F(k) / c(k)    F(k) - r c(k)"]
    for k in (1, 2, 3, 4, 6, 8, 12, 16):
        expected, cost = sum(best[:k]), float(curve.pass_cost(k))
        lines.append(f"{k:>6}{expected:>8.2f}{cost:>8.2f}{expected / cost:>15.2f}{expected - cost:>17.2f}")
    return "\n".join(lines)


def draw_base() -> str:
    """Entries of a base table, built from an answer of a toy model that was sure of every word."""
    request, answer = TEXT[:3], TEXT[3:]
    ids, certain = np.array(answer, np.int32)[:, None], np.zeros((len(answer), 1), np.float16)
    written = Text(0, 0, 0.0, request, answer, ids, certain)
    trie = trie_of(levels_of([Places.of([written])], len(WORDS)), len(WORDS))
    lines = [f"request: {' '.join(PROMPT[:3])}", f"answer:  {' '.join(PROMPT[3:])}", ""]
    lines += [f"{'last words':<16}{'seen':<8}what follows, by the mean of the model's probabilities"]
    for context in (["the"], ["on", "the"], ["dog", "sat", "on"]):
        tokens = [-1] * (3 - len(context)) + [WORDS.index(word) for word in context]
        node = base_table.find_entry(trie, *tokens)
        shown = [
            f"{WORDS[base_table.candidate(trie, node, i)]} {np.exp(-base_table.STEP * int(log)):.2f}"
            for i, log in enumerate(trie.logs[node])
            if log != base_table.ABSENT
        ]
        lines.append(f"{' '.join(context):<16}{trie.counts[node]:<8}{'   '.join(shown)}")
    return "\n".join(lines)


def draw_head() -> str:
    """What a light head reads and guesses after the words "the cat sat"."""
    return """\
hidden state under "cat" ---+
                            +--- block ---> guessed hidden state under "sat" ---> 2,048 output rows ---> on, by, down
embedding of "sat" ---------+                  |
                                               +--- block ---> guessed hidden state under "on" ---> ... ---> the, a
                       embedding of "on" ------+"""


# ------------------------------------------------------------------ images


def svg(width: float, height: float, parts: Iterable[str], title: str) -> str:
    """A picture on a white ground, which can be read on a dark page too."""
    style = "text{font:11px ui-monospace,monospace;fill:#1c1b19}.s{fill:#6a655c}"
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width:g} {height:g}" width="{width:g}" '
        f'height="{height:g}" role="img"><title>{escape(title)}</title><style>{style}</style>'
        f'<rect width="{width:g}" height="{height:g}" rx="8" fill="#fff"/>' + "".join(parts) + "</svg>\n"
    )


def themed_svg(width: float, height: float, parts: Iterable[str], title: str, style: str) -> str:
    """A picture without a ground, whose style has colours for light and dark pages."""
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width:g} {height:g}" role="img">'
        f"<title>{escape(title)}</title><style>{style}</style>" + "".join(parts) + "</svg>\n"
    )


def box(x: float, y: float, w: float, h: float, fill: str, more: str = "") -> str:
    return f'<rect x="{x:g}" y="{y:g}" width="{w:g}" height="{h:g}" rx="3" fill="{fill}" {more}/>'


def words(x: float, y: float, text: str, kind: str = "", more: str = "") -> str:
    return f'<text x="{x:g}" y="{y:g}" class="{kind}" {more}>{escape(text)}</text>'


def draw_mask_image(chinese: bool = False) -> str:
    """The mask of the toy step."""
    tree, window, _, prefix = one_step()
    newest, size, side, left = set(window.newest_nodes()), len(tree), 24, 120
    parts = []
    for row in range(size):
        parts.append(words(8, 50 + row * side, f"{label(tree, row)}  (T+{tree.depths[row]})"))
        for column in range(-3, size):
            seen = column < 0 or tree.ancestors[row] >> column & 1
            colour = "#e8e8e8" if not seen else "#999" if column < 0 else COLOURS[0]
            if column >= 0 and seen and tree.needs_logits[column] and column and column not in newest:
                colour = COLOURS[1]
            parts.append(box(left + (column + 3) * side, 34 + row * side, side - 2, side - 2, colour))
    ticks = [*(WORDS[t] for t in prefix[-4:-1]), *(str(n) for n in range(size))]
    parts += [words(left + 2 + i * side, 26, tick) for i, tick in enumerate(ticks)]
    below = "sees: the committed prefix (grey), window rows (blue), candidate rows (orange)"
    if chinese:
        below = "可见：已提交的前缀（灰）、窗口的行（蓝）、候选的行（橙）"
    parts.append(words(8, 52 + size * side, below, "s"))
    return svg(
        left + (size + 3) * side + 130,
        66 + size * side,
        parts,
        "九行的一步的掩码" if chinese else "The mask of a step of nine rows",
    )


def draw_costs_image(chinese: bool = False) -> str:
    """How many steps of one row a step costs, by its rows."""
    parts, y = [], 8.0
    for name, times in costs().items():
        y += 22
        title = name.replace("4 bits", "4 位") if chinese else name
        parts.append(words(8, y - 6, title, more='font-weight="600"'))
        for rows in (1, 4, 16, 64) if 4 in times else (1, 16, 64):
            times_one = times[rows] / times[1]
            wide = 190 * min(times_one, 12) / 12
            more = " +" if times_one > 12 else ""
            named = f"{rows} 行" if chinese else f"{rows} row{'s' * (rows > 1)}"
            parts += [words(24, y + 11, named), box(84, y, wide, 14, COLOURS[0])]
            parts.append(words(90 + wide, y + 11, f"{times_one:.1f} x{more}"))
            y += 19
    title = "一步的耗时，以一行的步为单位" if chinese else "Time of a step, in steps of one row"
    return svg(360, y + 10, parts, title)


def draw_window_image(chinese: bool = False) -> str:
    """Three steps of the window: levels, answers, and the n-grams on the diagonals."""
    steps, texts = steps_of("window")
    wide, high, left = 82, 26, 70
    parts: list[str] = []
    top = 0
    for number in SHOWN:
        record = steps[number]
        levels, tree = record["window"], record["tree"]
        depth = TokenTree.of(tree, record["parents"]).depths
        emitted = " ".join(visible(texts[token]) for token in record["tokens"])
        heading = f"第 {number} 步：输出 {emitted}" if chinese else f"step {number}: emits {emitted}"
        parts.append(words(8, top + 20, heading))
        y0 = top + 32
        columns = list(zip(*levels, strict=True))
        for level, rows in enumerate(levels):
            named = f"第 {level} 层" if chinese else f"level {level}"
            parts.append(words(8, y0 + level * high + 15, named, "s"))
            for column, row in enumerate(rows):
                more = f'stroke="{COLOURS[column % 5]}" stroke-width="{3 if row == 0 else 1.5}"'
                x, y = left + depth[row] * wide, y0 + level * high
                parts += [
                    box(x, y, wide - 8, high - 6, "#fff", more),
                    words(x + 4, y + 14, visible(texts[tree[row]])[:10]),
                ]
        parts.append(words(8, y0 + len(levels) * high + 15, "回答" if chinese else "answers", "s"))
        for column, rows in enumerate(columns):
            chain = [tree[row] for row in rows]
            answer = next((n[-1] for n in record["ngrams"] if n[:-1] == chain), None)
            if answer is None:
                continue
            colour, x, y = COLOURS[column % 5], left + (depth[rows[-1]] + 1) * wide, y0 + len(levels) * high
            more = f'stroke="{colour}" stroke-dasharray="3 2" stroke-width="1.5"'
            parts += [
                box(x, y, wide - 8, high - 6, "#fff", more),
                words(x + 4, y + 14, visible(texts[answer])[:10]),
            ]
            points = [(depth[row], level) for level, row in enumerate(rows)]
            for (x1, l1), (x2, l2) in zip(
                points, [*points[1:], (depth[rows[-1]] + 1, len(levels))], strict=True
            ):
                ends = left + x1 * wide + wide - 8, y0 + l1 * high + 14, left + x2 * wide, y0 + l2 * high + 6
                parts.append(
                    '<path d="M{:g} {:g}L{:g} {:g}" stroke="{}" stroke-width="2"/>'.format(*ends, colour)
                )
        top = y0 + (len(levels) + 1) * high
    return svg(left + 9 * wide, top + 12, parts, "窗口的三个步骤" if chinese else "The window in three steps")


def draw_completion(chinese: bool = False) -> str:
    """A completion of the default drafter: the tokens of one forward pass share a colour."""
    steps, texts = steps_of("completion")
    lines = [[(line, "s")] for line in wrap((PROMPTS / "2-write.txt").read_text(), 88)]  # of (text, class)
    lines += [[], []]
    for number, record in enumerate(steps):
        colour = f"c{number % len(COLOURS)}"
        for token in record["tokens"]:
            first, *others = texts[token].split("\n")
            lines[-1].append((first, colour))
            lines += [[(part, colour)] for part in others]
    count, passes = sum(len(record["tokens"]) for record in steps), len(steps)
    total = (
        f"{passes} 次前向传播得到 {count} 个 token"
        if chinese
        else f"{count} tokens from {passes} forward passes"
    )
    lines += [[], [(total, "s")]]
    parts = []
    for number, line in enumerate(lines):
        spans = "".join(f'<tspan class="{kind}">{escape(text)}</tspan>' for text, kind in line if text)
        parts.append(f'<text x="12" y="{22 + 16 * number}" xml:space="preserve">{spans}</text>')
    light = "".join(f".c{n}{{fill:{colour}}}" for n, colour in enumerate(COLOURS))
    dark = "".join(f".c{n}{{fill:{colour}}}" for n, colour in enumerate(DARK_COLOURS))
    style = (
        "text{font:12px ui-monospace,SFMono-Regular,Menlo,Consolas,'DejaVu Sans Mono',monospace;white-space:pre}"
        f".s{{fill:#6a655c}}{light}@media(prefers-color-scheme:dark){{.s{{fill:#a59f93}}{dark}}}"
    )
    return themed_svg(680, 14 + 16 * len(lines), parts, total, style)


#: Words of the plots of the adaptive drafter -> those of the Chinese copies.
PLOTTED = {
    "estimated probability": "估计的概率",
    "share that was right": "猜中的比例",
    "as estimated": "与估计一致",
    "candidates": "个候选",
    "tokens of the text so far": "文本至此的 token 数",
    "rows of the step": "一步的行数",
    "tokens it gave": "得到的 token 数",
    "no tree grown": "没有建树",
    "code, greedy": "代码，贪心",
    "maths, greedy": "数学，贪心",
    " cores": " 核",
    " threads": " 线程",
    "-Instruct in ": "-Instruct，",
    " on the cpu path": "，CPU 路径",
}


def in_chinese(name: str) -> str:
    """A plot with its words in Chinese."""
    text = (HERE / "images" / f"{name}.svg").read_text(encoding="utf-8")
    for english, chinese in PLOTTED.items():
        text = re.sub(rf"(<text[^>]*>[^<]*){english}", rf"\g<1>{chinese}", text)
    return text


IMAGES = {
    **{
        f"images/{name}.zh.svg": partial(in_chinese, name)
        for name in ("adaptive-calibration", "adaptive-rows")
    },
    "images/lesson-costs.zh.svg": partial(draw_costs_image, chinese=True),
    "images/lesson-window.zh.svg": partial(draw_window_image, chinese=True),
    "images/step.zh.svg": partial(draw_mask_image, chinese=True),
    "images/completion.svg": draw_completion,
    "images/completion.zh.svg": partial(draw_completion, chinese=True),
    "images/lesson-costs.svg": draw_costs_image,
    "images/lesson-window.svg": draw_window_image,
    "images/step.svg": draw_mask_image,
    "lesson/replay.html": lambda: page_of(read_trace(HERE / "traces" / "window.jsonl")),
    "lesson/replay-adaptive.html": lambda: page_of(read_trace(HERE / "traces" / "adaptive.jsonl")),
}
BLOCKS = {
    "lesson/1-one-token.md": {"costs": draw_costs},
    "lesson/2-jacobi.md": {"jacobi": draw_jacobi},
    "lesson/3-window.md": {"found": draw_found},
    "lesson/4-tree.md": {"tree": draw_tree, "mask": draw_mask},
    "lesson/5-verify.md": {"step": draw_step},
    "lesson/7-table.md": {"base": draw_base},
    "adaptive.md": {"head": draw_head, "rows": draw_rows},
}
BLOCKS |= {f"zh/{name}": blocks for name, blocks in BLOCKS.items()}


def page(name: str, text: str) -> str:
    """A page with its drawn blocks up to date."""
    for block, draw in BLOCKS[name].items():
        pattern, drawn = rf"(<!-- drawn: {block} -->\n```text\n).*?(\n```)", draw()
        text, count = re.subn(pattern, lambda m, drawn=drawn: m[1] + drawn + m[2], text, flags=re.S)
        if count != 1:
            raise SystemExit(f"error: {name} must have one block <!-- drawn: {block} -->, found {count}")
    return text


def main(arguments: Sequence[str]) -> None:
    for name, blocks in BLOCKS.items():
        if "--write" in arguments:
            (HERE / name).write_text(page(name, (HERE / name).read_text()))
        else:
            for block, draw in blocks.items():
                print(f"[{name}: {block}]\n{draw()}\n")
    for name, make in IMAGES.items():
        if "--write" in arguments:
            (HERE / name).write_text(make())


if __name__ == "__main__":
    main(sys.argv[1:])
