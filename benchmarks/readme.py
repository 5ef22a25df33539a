"""The blocks of README.md and README.zh.md: the speed table, and where other software is ahead."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from itertools import pairwise
from math import inf
from pathlib import Path
from types import MappingProxyType
from typing import Any

from lookahead.bench.methods import PLAIN
from lookahead.bench.record import Record

from . import quoted, startup
from .blocks import made, with_block
from .llamacpp_server import LLAMA_SERVER
from .paper import committed
from .report import markdown_table

ROOT = Path(__file__).parent.parent
RESULTS = ROOT / "docs" / "results"
README, README_ZH = ROOT / "README.md", ROOT / "README.zh.md"
#: The page whose table is in the README.
PAGE = "bench-packed"
#: The page of the larger model.
LARGER_PAGE = "bench-larger"
#: The page of the larger model in Q4_0, converted from its own file.
LARGER_Q4_0_PAGE = "bench-larger-q4_0"
#: Numbers of prompt tokens between which plain decoding is compared with llama.cpp's server by length.
LENGTHS = (128, 256)
#: method in the records -> name in the README; other methods are on the page only
NAMES = {
    LLAMA_SERVER: "llama.cpp's server",
    "openvino-greedy": "OpenVINO GenAI",
    "openvino-lookup": "OpenVINO GenAI prompt lookup",
    "plain": "ours, plain decoding",
    "prompt-lookup": "ours, prompt lookup",
    "lookahead:15,5,15": "ours, lookahead (15,5,15), the paper's",
    "adaptive": "ours, adaptive, the default",
    "adaptive:sources": "ours, adaptive without a base table",
    "adaptive:table": "ours, adaptive with its base table",
}
#: Words of the README's block -> those of README.zh.md; names of data sets, machines and software stay as they are
CHINESE = {
    r"\*\*First token from the server\*\*, with (\d+) clients?: (.*?), against (.*?) for llama\.cpp's server "
    r"\(\[the page\]\((.*?)\)\)\.": (
        r"**服务器的第一个 token**，\1 个客户端时：\2，llama.cpp 服务器为 \3（[结果页](\4)）。"
    ),
    r"Prompts of each set: (\d+)\. ": r"每个数据集的提示词数：\1。",
    r"Prompts of each set: (\d+), decoded in (\d+) runs\. \"times plain\" is the speed of all sequences relative to "
    r"our plain decoding, with an interval over prompts, and \"runs\" its range over runs\. ": (
        r"每个数据集的提示词数：\1，各运行 \2 次。“相对普通解码”是所有序列合计的速度与本库普通解码之比，"
        r"区间取自提示词；“各次运行”是它在各次运行中的范围。"
    ),
    r"(\d+) cores, (.*?), (\d+) threads": r"\1 核, \2, \3 线程",
    r" in ([\w +]+) on the (\S+) path": r", 权重 \1, \2 路径",
    r" \(\[the page\]\((.*?)\)\)\.": r"（[结果页](\1)）。",
    r"\| times plain \(95 %\) \| runs \|": "| 相对普通解码 (95 %) | 各次运行 |",
    r"\*\*Slower sequences\*\*: in the first run, (\d+) of (\d+) sequences took more than 1\.02 times as "
    r"long with the default as with plain decoding, and (\d+) more than 1\.1 times; the largest ratio is "
    r"([\d.]+)\.": (
        r"**变慢的序列**：第一次运行中，默认方法有 \1/\2 个序列用时超过普通解码的 1.02 倍，"
        r"\3 个超过 1.1 倍，最慢 \4。"
    ),
    r" For comparison, the second run of plain decoding took more than 1\.02 times as long as its first in (\d+) "
    r"sequences, more than 1\.1 times in (\d+), at worst ([\d.]+)\.": (
        r"作为对照，普通解码的第二次运行中，用时超过第一次 1.02 倍的有 \1 个，超过 1.1 倍的有 \2 个，最慢 \3。"
    ),
    r" On \[more categories\]\((.*?)\), decoded once each \((.*?), commit (\w+)\), (\d+) of (\d+) sequences took "
    r"more than 1\.02 times as long, (\d+) more than 1\.1 times, at worst ([\d.]+)\.": (
        r"在[更多类别](\1)上各解码一次（\2，commit \3），\4/\5 个序列用时超过 1.02 倍，\6 个超过 1.1 倍，最慢 \7。"
    ),
    r"\*\*Without loops\*\*: in the (\d+) of (\d+) sequences in which plain decoding repeats no eight "
    r"tokens, the default has S (\S+) and (\S+( \(\S+\))?) times plain decoding's speed: small models repeat "
    r"themselves, which favours drafts\.": (
        r"**没有循环时**：在普通解码没有重复任何八个 token 的 \1/\2 个序列中，默认方法的 S 为 \3，"
        r"速度是普通解码的 \4 倍：小模型会重复自己，这有利于草稿。"
    ),
    r"\*\*llama\.cpp's own programs\*\*, in a run of their own, reach at most (\d+) tokens/s with drafts \((.*?)\), "
    r"and (\d+) without, on three data sets": (
        r"**llama.cpp 自己的程序**，另一次测量：在三个数据集上，使用草稿最高每秒 \1 个 token（\2），不用草稿最高 \3"
    ),
    r"\*\*Plain decoding\*\* is (\S+) times as fast as llama\.cpp's server in (\S+) after prompts of fewer "
    r"than (\d+) tokens, (\S+) times after (\d+) to (\d+), and (\S+) times after longer ones": (
        r"**普通解码**的速度 \1 倍于 llama.cpp 服务器（\2，提示词少于 \3 个 token 时），"
        r"\4 倍（\5 到 \6 个时），更长时 \7 倍"
    ),
    r", because llama\.cpp slows down more with the context": "，因为 llama.cpp 随上下文变慢得更多",
    r"With all methods in Q4_0, tokens/s over all sequences \((.*?), commit (\w+), \[the page\]\((.*?)\)\): (.*)\. "
    r"Of our drafted completions, (\d+) of (\d+) equal those of plain decoding\.": (
        r"所有方法都用 Q4_0 时，全部序列合计每秒的 token 数（\1，commit \2，[结果页](\3)）：\4。"
        r"本库使用草稿的文本中，\5/\6 与普通解码一致。"
    ),
    r"\. In the (\d+) runs it reached (.*?) tokens/s, and llama\.cpp's server (.*?); the host is shared with other "
    r"virtual machines\.": (
        r"。\1 次运行中，它每秒 \2 个 token，llama.cpp 服务器 \3 个；主机上还有其他虚拟机。"
    ),
    r"\| equal \|": "| 一致 |",
    r"(\d+) of (\d+)": r"\1/\2",
    r"llama\.cpp's server": "llama.cpp 服务器",
    r"ours, plain decoding": "本库，普通解码",
    r"ours, prompt lookup": "本库，prompt lookup",
    r"ours, lookahead (\S+), the paper's": r"本库，前瞻解码 \1，论文的方法",
    r"ours, adaptive, the default": "本库，自适应，默认",
    r"ours, adaptive without a base table": "本库，自适应，无基础表",
    r"ours, adaptive with its base table": "本库，自适应，有基础表",
    r"\*\*Start\*\*: (.*?) from the command to the end of a completion of one token": (
        r"**启动**：从命令到输出一个 token 并结束 \1"
    ),
    r"\*\*Memory\*\*: (.*?) at most, with the default model's file": (
        r"**内存**：使用默认模型的文件时最多常驻 \1"
    ),
    r", against (.*?) for llama\.cpp\.": r"，llama.cpp 为 \1。",
    r"\*\*First use\*\*: (.*?) with empty caches, measured when a first use still compiled the kernels; the "
    r"installation does now\.": r"**首次使用**（缓存为空）：\1，测量时首次使用还要编译算子；现在安装时就已编译。",
    r"\*\*The default model\*\*": "**默认模型**",
    r": start (.*?), memory (.*?), without mapped weights (.*?\))(?= \(llama|;)": (
        r"：启动 \1，内存 \2，不含映射的权重 \3"
    ),
    r"; first use (.*?)\.\n": r"；首次使用 \1。\n",
    r"Start: from the command to the end of a completion of one token\. First use: until that token, with empty "
    r"caches\. Medians with their range": (
        "启动：从命令到输出一个 token 并结束。首次使用：缓存为空时到输出该 token。中位数与范围"
    ),
    r"Medians with their range, both with the default model's file": "中位数与范围，两者都使用默认模型的文件",
}


def write() -> None:
    """Write the blocks of both languages."""
    README.write_text(with_blocks(README.read_text()))
    README_ZH.write_text(with_blocks(README_ZH.read_text(), CHINESE))


def speeds(facts: dict[str, Any]) -> str:
    """The README's table: tokens per second by method and data set, then figures over all of them.

    These are the speed-up with its 95 % interval over prompts, its range over runs, S and equality.
    """
    lines = facts["figures"]
    sets = list(dict.fromkeys(line["workload"] for line in lines))
    rows = []
    for method in dict.fromkeys(line["method"] for line in lines):
        name = _name(method)
        own = {line["workload"]: line["all"] for line in lines if line["method"] == method}
        equal, compared = (sum(own[w][key] for w in sets) for key in ("equal", "compared"))
        rates = ["–" if own[w]["rate"] is None else f"{own[w]['rate']:.0f}" for w in sets]
        total = facts["overall"][method]
        times = "–" if total["total"] is None else f"{total['total']:.2f}"
        if total["low"] is not None and method != "plain":
            times += f" ({total['low']:.2f}–{total['high']:.2f})"
        runs = "–"
        if total["total_low"] is not None and method != "plain":
            runs = f"{total['total_low']:.2f}–{total['total_high']:.2f}"
        failed = next((line["failed"] for line in lines if line["method"] == method and "failed" in line), "")
        s = "–" if total["s_steps"] is None else f"{total['s_steps']:.2f}"
        rows.append([name, *rates, times, runs, s, f"{equal} of {compared}" if compared else failed or "–"])
    return markdown_table(["tokens/s", *sets, "times plain (95 %)", "runs", "S", "equal"], rows)


def _name(method: str) -> str:
    """The name of a method in the README."""
    name = NAMES.get(method) or NAMES.get(method.partition("=")[0])
    if name is not None:
        return name
    head, _, file = method.partition(":")
    file, _, mode = file.partition(":")
    details = [suffix[1:] for suffix in Path(file).suffixes[-2:-1]]
    details += [f"({each})" if "," in each else each for each in mode.split(":") if each]
    return ", ".join([NAMES.get(head, head), *details])


def slower(facts: dict[str, Any]) -> str:
    """How many sequences drafting slowed down, and how many plain decoding's second run."""
    adaptive, plain = facts["overall"]["adaptive"], facts["overall"]["plain"]
    text = (
        f"- **Slower sequences**: in the first run, {adaptive['slower']} of {adaptive['timed']} sequences took "
        f"more than 1.02 times as long with the default as with plain decoding, and {adaptive['much_slower']} more "
        f"than 1.1 times; the largest ratio is {adaptive['worst']:.2f}."
    )
    if plain["worst"] is not None:
        text += (
            " For comparison, the second run of plain decoding took more than 1.02 times as long as its first in "
            f"{plain['slower']} sequences, more than 1.1 times in {plain['much_slower']}, at worst "
            f"{plain['worst']:.2f}."
        )
    return text


def slower_elsewhere(facts: dict[str, Any]) -> str:
    """How many sequences the default slowed down on the page of more categories, where each is decoded once.

    Args:
        facts: those of the page ``end-to-end``.
    """
    own = [line["all"] for line in facts["figures"] if line["method"] == "adaptive"]
    timed, slower, much_slower = (
        sum(each[key] for each in own) for key in ("timed", "slower", "much_slower")
    )
    worst = max(each["worst"] for each in own)
    machine, commit = made(facts)
    return (
        f"On [more categories](docs/results/end-to-end.md), decoded once each ({machine.partition(',')[0]}, "
        f"commit {commit[:7]}), "
        f"{slower} of {timed} sequences took more than 1.02 times as long, {much_slower} more than 1.1 times, "
        f"at worst {worst:.2f}."
    )


def without_loops(facts: dict[str, Any]) -> str:
    """The default's figures over the sequences without loops; "" if the page has none."""
    for line in facts.get("totals", ()):
        found = re.fullmatch(r"the (\d+) loop-free of (\d+)", line["workload"])
        if found is not None and line["method"] == "adaptive":
            own = line["all"]
            between = "" if own["low"] is None else f" ({own['low']:.2f}–{own['high']:.2f})"
            return (
                f"- **Without loops**: in the {found[1]} of {found[2]} sequences in which plain decoding repeats no "
                f"eight tokens, the default has S {own['s_steps']:.2f} and {own['total']:.2f}{between} times plain "
                "decoding's speed: small models repeat themselves, which favours drafts."
            )
    return ""


def by_length(records: Sequence[Record]) -> str:
    """Plain decoding compared with that of llama.cpp's server, by length of the prompt and by run.

    Args:
        records: those of the README's page.

    Returns:
        Two sentences; "" if the records have no such server.
    """
    other = next((x["method"] for x in records if x["method"].startswith(f"{LLAMA_SERVER}:")), "")
    if not other or ":" in other.removeprefix(f"{LLAMA_SERVER}:"):
        return ""

    def rate(method: str, least: int = 0, most: float = inf, repeat: int | None = None) -> float:
        own = [
            x
            for x in records
            if x["method"] == method and least <= x["prompt_tokens"] < most and repeat in (None, x["repeat"])
        ]
        tokens = sum(x["new_tokens"] - x["prefill_tokens"] for x in own)
        return tokens / sum(x["decode_seconds"] for x in own)

    ends = (0, *LENGTHS, inf)
    ratios = [rate(PLAIN, *span) / rate(other, *span) for span in pairwise(ends)]
    repeats = sorted({x["repeat"] for x in records})
    ours, theirs = (
        ", ".join(f"{rate(method, repeat=each):.0f}" for each in repeats) for method in (PLAIN, other)
    )
    kind = Path(other).suffixes[-2][1:]
    first, last = LENGTHS
    rises = ", because llama.cpp slows down more with the context" if ratios == sorted(ratios) else ""
    return (
        f"- **Plain decoding** is {ratios[0]:.2f} times as fast as llama.cpp's server in {kind} after prompts of "
        f"fewer than {first} tokens, {ratios[1]:.2f} times after {first} to {last - 1}, and {ratios[2]:.2f} times "
        f"after longer ones{rises}. In the {len(repeats)} runs it reached {ours} tokens/s, and llama.cpp's server "
        f"{theirs}; the host is shared with other virtual machines."
    )


def own_programs(figures: dict[str, list[list[str]]]) -> str:
    """The fastest of llama.cpp's own programs, plain and with drafts."""

    def best(drafts: bool) -> tuple[float, str]:
        plain = ("llama-bench, plain", "llama-server, none")
        return max(
            (float(row[3].split()[0]), row[0])
            for rows in figures.values()
            for row in rows
            if row[0].startswith("llama-") and (row[0] in plain) != drafts
        )

    (plain, _), (drafted, mode) = best(False), best(True)
    return (
        f"- **llama.cpp's own programs**, in a run of their own, reach at most {drafted:.0f} tokens/s with drafts "
        f"({mode}), and {plain:.0f} "
        "without, on three data sets ([the page](docs/results/llamacpp-examples.md))."
    )


def first_token(figures: Sequence[dict[str, Any]]) -> str:
    """Where llama.cpp's server emits the first token sooner; "" if it does so for no number of clients.

    Args:
        figures: those of the page of the server.
    """
    times = {(line["clients"], line["method"]): line["first_token_p50"] for line in figures}
    for clients, method in times:
        ours, theirs = times[clients, "adaptive"], times.get((clients, "llama.cpp's server"), inf)
        if method == "adaptive" and theirs < ours:
            with_clients = f"{clients} client{'s' * (clients > 1)}"
            return (
                f"- **First token from the server**, with {with_clients}: {1000 * ours:.0f} ms, "
                f"against {1000 * theirs:.0f} ms for llama.cpp's server ([the page](docs/results/serve.md)).\n"
            )
    return ""


def in_q4_0(facts: dict[str, Any]) -> str:
    """Tokens per second of the larger model in Q4_0, over all sequences of its page, and how many are equal.

    Args:
        facts: those of the page.
    """
    totals = facts["overall"]
    told = "; ".join(
        f"{_name(method).replace(', Q4_0', '')} {total['rate']:.0f}"
        for method, total in totals.items()
        if total["rate"] is not None
    )
    drafted = [total for method, total in totals.items() if method != "plain"]
    equal, compared = (sum(total[key] for total in drafted) for key in ("equal", "compared"))
    machine, commit = made(facts)
    return (
        f"With all methods in Q4_0, tokens/s over all sequences ({machine.partition(',')[0]}, commit {commit[:7]}, "
        f"[the page](docs/results/{LARGER_Q4_0_PAGE}.md)): {told}. Of our drafted completions, {equal} of {compared} "
        "equal those of plain decoding."
    )


def behind(found: dict[str, Any], served: Sequence[dict[str, Any]] = ()) -> str:
    """Start-up, memory and first use as a list.

    Args:
        found: the figures of the page of start-up.
        served: those of the page of the server.
    """
    shown = startup.cells(found)
    ours, theirs = shown["ours"], shown.get("llama.cpp", {})

    def against(what: str) -> str:
        return f", against {theirs[what]} for llama.cpp" if what in theirs else ""

    if "unmapped" in ours:
        return behind_by_file(shown)
    return (
        f"- **Start**: {ours['start']} from the command to the end of a completion of one token{against('start')}.\n"
        f"- **Memory**: {ours['memory']} at most, with the default model's file{against('memory')}.\n"
        f"{first_token(served)}"
        f"- **First use**: {ours['first use']} with empty caches, measured when a first use still compiled the "
        "kernels; the installation does now.\n"
        "- Medians with their range, both with the default model's file ([the page](docs/results/startup.md))."
    )


def behind_by_file(shown: Mapping[str, Mapping[str, str]]) -> str:
    """Start-up, memory and first use of each file, as a list.

    Args:
        shown: ``startup.cells``.
    """
    lines = []
    for name, own in shown.items():
        program, _, file = name.partition(", ")
        if program != "ours":
            continue
        theirs = shown.get(name.replace(program, "llama.cpp"), {})
        against = f" (llama.cpp: {theirs['start']}, {theirs['memory']})" if theirs else ""
        lines.append(
            f"- **{file or 'The default model'}**: start {own['start']}, memory {own['memory']}, without "
            f"mapped weights {own['unmapped']}{against}; first use {own['first use']}."
        )
    return "\n".join(
        [
            *lines,
            "- Start: from the command to the end of a completion of one token. First use: until that token, with "
            "empty caches. Medians with their range ([the page](docs/results/startup.md)).",
        ]
    )


def _size(command: str) -> str:
    """A sentence with the numbers of prompts and of runs that a command has; "" without them."""
    prompts, runs = (re.search(rf"--{option} (\d+)", command) for option in ("limit", "repeats"))
    if prompts is None:
        return ""
    if runs is None:
        return f"Prompts of each set: {prompts[1]}. "
    return (
        f'Prompts of each set: {prompts[1]}, decoded in {runs[1]} runs. "times plain" is the speed of all '
        'sequences relative to our plain decoding, with an interval over prompts, and "runs" its range over runs. '
    )


def with_blocks(text: str, words: Mapping[str, str] = MappingProxyType({})) -> str:
    """The README with figures from the pages; a block without a page stays as it is.

    Args:
        text: README.md or README.zh.md.
        words: translations of the words that the patterns match.
    """
    blocks = {}
    page = RESULTS / f"{PAGE}.json"
    if page.is_file():
        facts = json.loads(page.read_text())
        where = f"{facts['where']} ([the page](docs/results/{PAGE}.md)). {facts['busy']}".strip()
        others = RESULTS / "end-to-end.json"
        elsewhere = slower_elsewhere(json.loads(others.read_text())) if others.is_file() else ""
        told = [f"{slower(facts)} {elsewhere}".rstrip(), without_loops(facts)]
        page = RESULTS / "records" / f"{PAGE}.jsonl.gz"
        if page.is_file():
            told.append(by_length(committed.read(page)[1]))
        page = RESULTS / "llamacpp-examples.json"
        if page.is_file():
            told.append(own_programs(json.loads(page.read_text())["figures"]))
        blocks["speeds"] = f"{_size(facts['command'])}{where}\n\n{speeds(facts)}\n\n" + "\n".join(
            filter(None, told)
        )
    if all((RESULTS / f"{name}.json").is_file() for name in quoted.WORTH):
        block = quoted.worth(quoted.CHINESE if words else {})
        blocks["worth"] = re.sub(r"\((\.\./)?results/", "(docs/results/", block)
    page = RESULTS / f"{LARGER_PAGE}.json"
    if page.is_file():
        facts = json.loads(page.read_text())
        where = f"{facts['where']} ([the page](docs/results/{LARGER_PAGE}.md)). {facts['busy']}".strip()
        blocks["larger"] = f"{_size(facts['command'])}{where}\n\n{speeds(facts)}"
        page = RESULTS / f"{LARGER_Q4_0_PAGE}.json"
        if page.is_file():
            blocks["larger"] += f"\n\n{in_q4_0(json.loads(page.read_text()))}"
    page = RESULTS / "startup.json"
    if page.is_file():
        served = RESULTS / "serve.json"
        lines = json.loads(served.read_text())["figures"] if served.is_file() else []
        blocks["behind"] = behind(json.loads(page.read_text())["figures"], lines)
    for name, block in blocks.items():
        for english, other in words.items():
            block = re.sub(english, other, block)
        text = with_block(text, README.name, name, block)
    return text
