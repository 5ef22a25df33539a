"""What happens during a completion: the pool's growth and use, Jacobi's convergence by iteration, and memory.

    python -m benchmarks.dynamics --data data --limit 5

The paper has no figures for these. All except memory follow from the tokens alone, so they depend neither on the
machine nor on its load. Lookahead is (15, 5, 15) with an empty pool, Jacobi a block of 16. The JSON next to the page
has the counts of every completion.
"""

from __future__ import annotations

import argparse
import os
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import lookahead
from lookahead import Jacobi, Lookahead
from lookahead.bench.record import environment

from . import batch_size
from .datasets import load_workload
from .page import write_report
from .report import markdown_table

SETS = ("humaneval", "mbpp", "gsm8k", "classeval", "mt-bench", "spec-bench")
#: Emitted tokens after which the pool is counted.
MARKS = (16, 64, 128, 256, 512)
BLOCK = 16
#: Iterations in the tables of convergence.
AGES = range(8)
#: Prompt length at which memory is measured.
PROMPT = 512


def pool_of_text(llm: Any, prompt: Any, tokens: int) -> dict[str, Any]:
    """Sizes of the pool at each mark as (keys, n-grams), and what became of its candidates."""
    sizes: dict[str, tuple[int, int]] = {}
    state: Any = None
    for update in llm.run([prompt], max_new_tokens=tokens, ignore_eos=True, drafter=Lookahead(15, 5, 15)):
        sequence = update.sequence
        state = sequence.drafting or state
        for mark in MARKS:
            if state is not None and len(sequence.tokens) >= mark and str(mark) not in sizes:
                stats = state.pool.stats()
                sizes[str(mark)] = (int(stats["keys"]), int(stats["continuations"]))
    stats = sequence.stats
    drafted = state.stats()
    return {
        "sizes": sizes,
        "new_tokens": stats.new_tokens,
        "steps": stats.steps,
        "hit_rate": drafted["pool_hit_rate"],
        "match_length": drafted["mean_match_length"],
    }


def convergence_of_text(llm: Any, prompt: Any, tokens: int) -> dict[str, Any]:
    """How often a guess is correct, by the number of iterations that its block has been through."""
    # Record the guesses of every step.
    guesses: list[tuple[int, list[int]]] = []  # (position of a step's first guess, the step's guesses)
    emitted = 0
    block_start = 1
    iterations = 0
    entered: list[int] = []  # by step, how many iterations its block has been through
    for update in llm.run([prompt], max_new_tokens=tokens, ignore_eos=True, drafter=Jacobi(BLOCK)):
        if update.tree is not None:
            guesses.append((emitted, update.tree.tokens[1:]))
            entered.append(iterations)
            iterations += 1
            if emitted + len(update.tokens) >= block_start + BLOCK:
                block_start = emitted + len(update.tokens)
                iterations = 0
        emitted = len(update.sequence.tokens)

    # Compare them with the tokens that were emitted.
    text = update.sequence.tokens
    stats = update.sequence.stats
    right = Counter[int]()
    seen = Counter[int]()
    done = Counter[int]()
    for (first, row), age in zip(guesses, entered, strict=True):
        pairs = list(zip(row, text[first:], strict=False))
        seen[age] += len(pairs)
        right[age] += sum(guess == token for guess, token in pairs)
        done[age] += BLOCK - 1 - len(row)
    ages = range(BLOCK)
    return {
        "seen": [seen[age] for age in ages],
        "right": [right[age] for age in ages],
        "emitted": [done[age] for age in ages],
        "new_tokens": stats.new_tokens,
        "steps": stats.steps,
    }


def memory(llm: Any) -> dict[str, float]:
    """MB after a prompt of ``PROMPT`` tokens and a step: keys and values, and each drafter's state."""
    text = [(101 * i + 7) % llm.vocabulary for i in range(PROMPT)]
    held = batch_size.memory(llm, text, 2)
    kept = {f"state of {name}": size / 1e6 for name, size in held["kept"].items()}
    return {"keys and values": held["cache per token"] * PROMPT / 1e6, **kept}


def pool_table(texts: dict[str, list[dict[str, Any]]]) -> str:
    """Means over the completions of each workload that are as long as the mark."""
    rows = []
    for name, each in texts.items():
        sizes = []
        for mark in map(str, MARKS):
            there = [text["sizes"][mark] for text in each if mark in text["sizes"]]
            mean = [sum(column) / len(there) for column in zip(*there, strict=True)]
            sizes.append(f"{mean[0]:.0f} / {mean[1]:.0f}" if there else "–")
        steps = sum(text["steps"] for text in each)
        hits = sum(text["hit_rate"] * text["steps"] for text in each)
        matched = sum(text["match_length"] * text["hit_rate"] * text["steps"] for text in each)
        ratio = sum(text["new_tokens"] - 1 for text in each) / steps
        rows.append(
            [name, str(len(each)), *sizes, f"{hits / steps:.2f}", f"{matched / hits:.2f}", f"{ratio:.2f}"]
        )
    heads = ["workload", "texts", *(f"after {mark}" for mark in MARKS), "hit rate", "match length", "S"]
    return markdown_table(heads, rows, texts=1)


def convergence_table(texts: dict[str, list[dict[str, Any]]], ages: Sequence[int]) -> str:
    """Shares of all guesses of a workload."""
    rows = []
    for name, each in texts.items():
        shares = []
        for age in ages:
            seen, right = (sum(text[key][age] for text in each) for key in ("seen", "right"))
            shares.append(f"{right / seen:.2f}" if seen >= 20 else "–")
        ratio = sum(text["new_tokens"] - 1 for text in each) / sum(text["steps"] for text in each)
        rows.append([name, *shares, f"{ratio:.2f}"])
    return markdown_table(["workload", *map(str, ages), "S"], rows, texts=1)


def block_table(texts: dict[str, list[dict[str, Any]]], ages: Sequence[int]) -> str:
    """Shares of all positions of the blocks of a workload that are correct or emitted."""
    rows = []
    for name, each in texts.items():
        shares = []
        for age in ages:
            seen, right, done = (sum(text[key][age] for text in each) for key in ("seen", "right", "emitted"))
            shares.append(f"{(right + done) / (seen + done):.2f}" if seen + done >= 20 else "–")
        rows.append([name, *shares])
    return markdown_table(["workload", *map(str, ages)], rows, texts=1)


def convergence_text(texts: dict[str, list[dict[str, Any]]]) -> str:
    """What both tables of convergence show, over all workloads."""
    every = [text for each in texts.values() for text in each]

    def total(key: str, age: int) -> int:
        return sum(text[key][age] for text in every)

    def share(age: int, *keys: str) -> float:
        positions = total("seen", age) + total("emitted", age)
        return sum(total(key, age) for key in keys) / max(1, positions)

    def correct(age: int) -> float:
        return share(age, "right", "emitted")

    first, last = AGES[0], AGES[-1]
    growth = correct(last) - correct(first)
    emitted = share(last, "emitted") - share(first, "emitted")
    ratios = [
        sum(text["new_tokens"] - 1 for text in each) / sum(text["steps"] for text in each)
        for each in texts.values()
    ]
    return (
        "The early design of this library expected 15 % of a block to be correct after one iteration and 97 % "
        f"after six; here it is {100 * correct(1):.0f} % and {100 * correct(6):.0f} %. A guess is evaluated after "
        "other guesses, so an iteration is sure to correct only the first wrong one: S is "
        f"{min(ratios):.2f} to {max(ratios):.2f}. From {first} to {last} iterations, the share of correct positions "
        f"grows by {100 * growth:.0f} percentage points, that of emitted tokens among them by {100 * emitted:.0f}. "
        "That is why the paper keeps the n-grams of the trajectory in a pool instead of waiting for convergence."
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    add = parser.add_argument
    add("--model", help="default: the library's default model")
    add("--data", type=Path, required=True, help="folder of data sets")
    add("--limit", type=int, default=5, help="prompts of each set")
    add("--max-new-tokens", type=int, default=MARKS[-1], help="completions continue after end tokens")
    add("--out", type=Path, default=Path("docs/results/dynamics"), help="figures, without suffix")
    given = parser.parse_args()
    # Decode every prompt with lookahead and with Jacobi decoding.
    where = environment()
    load = os.getloadavg()[0]
    llm = lookahead.load(given.model)
    pools: dict[str, list[dict[str, Any]]] = {}
    blocks: dict[str, list[dict[str, Any]]] = {}
    for name in SETS:
        for prompt in load_workload(name, given.limit, 0, given.data):
            ids = prompt.tokens(llm.tokenizer)
            pools.setdefault(name, []).append(pool_of_text(llm, ids, given.max_new_tokens))
            blocks.setdefault(name, []).append(convergence_of_text(llm, ids, given.max_new_tokens))
        print(name, flush=True)
    sizes = memory(llm)

    # Write the page.
    body = [
        "## The pool of (15, 5, 15)",
        "",
        "Keys / n-grams that the pool holds after so many emitted tokens; the share of steps in which it had "
        "candidates; how many tokens of the best of them were right, in those steps; tokens a step. n-grams come "
        "from the window, the prompt and the text.",
        "",
        pool_table(pools),
        "",
        f"## Jacobi's convergence, blocks of {BLOCK}",
        "",
        "The share of guesses that are the text's own token, by how many iterations their block had behind it: 0 are "
        "random tokens of the prompt. A guess counts even where an earlier one is wrong; positions that have been "
        "emitted do not count. Fewer than 20 guesses are not shown.",
        "",
        convergence_table(blocks, AGES),
        "",
        "The same, counting positions of the block that have been emitted as correct, as a block of Jacobi decoding "
        "that is iterated until it is complete does:",
        "",
        block_table(blocks, AGES),
        "",
        convergence_text(blocks),
        "",
        f"## Memory after a prompt of {PROMPT} tokens and a step",
        "",
        markdown_table(["what", "MB"], [[name, f"{size:.2f}"] for name, size in sizes.items()], texts=1),
        "",
        "What drafters keep of a whole text is on the page of [batch sizes](batch-size.md).",
    ]
    record = {**where, "model": llm.name, "dtype": llm.dtype, "load": load}
    facts = {"pool": pools, "convergence": blocks, "memory": sizes}
    write_report(given.out, "Within a completion: pool, convergence, memory", record, facts, body)


if __name__ == "__main__":
    main()
