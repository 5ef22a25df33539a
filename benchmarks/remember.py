"""S of the adaptive drafter in a second session, with what a user's first session may leave behind.

    python -m benchmarks.remember OUT.json --model FILE.gguf [--rows 4] [--new-tokens 160]

The questions are in ``questions/remember.toml``: three users whose second session resembles the first, and questions
that resemble neither. Kept are the first session's prompts and answers, in one of these forms:

    table          nothing: the tokenizer's table alone
    answers W      the table, with the answers counted W times in it
    text W         the same with the prompts
    best W         the text, with the probabilities of the best tokens at each position of the answers
    matches        the table, and suffix matches in the text (the source corpus)
    answers W + matches

Steps have a fixed number of rows, so S depends neither on the machine nor on its load. Every output is compared with
plain decoding; a difference ends the run.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import tomllib
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

import lookahead
from lookahead import AdaptiveState
from lookahead.bench.record import commit, describe_machine, machine
from lookahead.core.verify import as_choose
from lookahead.drafters import Adaptive, Plain
from lookahead.drafters.adaptive.base_files import key_of, read_table
from lookahead.drafters.adaptive.calibration import ORDERS
from lookahead.drafters.adaptive.settings import DEFAULT_SOURCES
from lookahead.drafters.adaptive.sources.base_table import save_table
from lookahead.learning import table
from lookahead.learning.self_text import Recorder
from lookahead.learning.table import Places
from lookahead.learning.text_parts import ANSWER, Text
from lookahead.options import Options

QUESTIONS = Path(__file__).parent / "questions" / "remember.toml"


def recorded(llm: Any, prompts: list[list[int]], new_tokens: int) -> list[Text]:
    """The greedy answers, with the best tokens at each position."""
    engine = llm.engine(max_sequences=len(prompts))
    recorders = []
    for prompt in prompts:
        request = llm.prepare(prompt, Options(max_new_tokens=new_tokens, drafter=Plain()))
        recorders.append(Recorder(as_choose(request.choose)))
        engine.add(replace(request, choose=recorders[-1], detokenizer=None, tag=len(recorders) - 1))
    texts = []
    while engine.busy:
        for update in engine.step():
            if update.result is not None:
                index = update.sequence.request.tag
                best = np.stack(recorders[index].ids), np.stack(recorders[index].logprobs)
                texts.append(Text(index, ANSWER, 0.0, prompts[index], update.result.checked().tokens, *best))
    engine.close()
    return sorted(texts, key=lambda text: text.number)


def places_of(texts: list[Text]) -> dict[str, list[Places]]:
    """The positions of the texts in each form."""
    prompts = Places.of_corpus([np.array(text.prompt) for text in texts])
    answers = Places.of_corpus([np.array([*text.prompt[-ORDERS:], *text.completion]) for text in texts])
    return {"text": [prompts, answers], "answers": [answers], "best": [prompts, Places.of(texts)]}


def with_text(base: Any, parts: list[Places], weight: float, file: Path) -> str:
    """A table of ``base`` and of these positions, saved to a file."""
    largest = max(int(max(part.contexts.max(), part.ids.max())) for part in parts) + 1
    vocabulary = max(base.vocabulary, largest)
    known = table.levels_in(base.trie, vocabulary)
    own = table.levels_of(parts, vocabulary, [weight] * len(parts), known=known)
    trie = table.trie_of(table.joined(known, own), vocabulary)
    save_table(file, trie, base.counts, vocabulary, base.tokenizer, base.learned)
    return str(file)


def parts_of(make: Any, prompts: list[list[int]]) -> list[tuple[Any, list[list[int]]]]:
    """(drafter, prompts that it may have together): those that share a state come one at a time."""
    if make().state is None:
        return [(make(), prompts)]
    return [(make(), [prompt]) for prompt in prompts]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("out", type=Path)
    parser.add_argument("--model")
    parser.add_argument("--rows", type=int, default=4)
    parser.add_argument("--new-tokens", type=int, default=160)
    parser.add_argument("--weights", type=float, nargs="+", default=[4, 16, 64])
    parser.add_argument("--threads", type=int, default=1)
    given = parser.parse_args()
    llm = lookahead.load(given.model, threads=given.threads)
    origin = {"model": Path(llm.name).name, "machine": describe_machine(machine()), "commit": commit()}
    base = read_table(key_of(llm.model), llm.vocabulary)
    if base is None:
        raise SystemExit(
            f"{llm.name} has no base table yet; decode once with it, and wait until one is counted"
        )
    scenarios = tomllib.loads(QUESTIONS.read_text())

    def chats(name: str, session: str) -> list[list[int]]:
        scenario = scenarios[name]
        texts = [scenario["frame"].format(question) for question in scenario[session]]
        return [llm.encode([{"role": "user", "content": text}]) for text in texts]

    plain = {
        name: [
            result.tokens
            for result in llm.generate(
                chats(name, "second"), drafter=Plain(), max_new_tokens=given.new_tokens, batch_size=8
            )
        ]
        for name in scenarios
    }
    lines: list[dict[str, Any]] = []

    def s_of(name: str, questions: str, kept: str, make: Any) -> None:
        # The sequences share passes, which does not change their drafts.
        results = [
            llm.generate(part, drafter=drafter, max_new_tokens=given.new_tokens, batch_size=len(part))
            for drafter, part in parts_of(make, chats(questions, "second"))
        ]
        found = [result for part in results for result in part]
        if [result.tokens for result in found] != plain[questions]:
            raise SystemExit(f"{name}, {questions}, {kept}: the output differs from plain decoding")
        steps = sum(result.stats.steps for result in found)
        new = sum(result.stats.new_tokens - 1 for result in found)
        line = {
            "user": name,
            "questions": questions,
            "kept": kept,
            "rows": given.rows,
            "new": new,
            "steps": steps,
        }
        lines.append(origin | line | {"s": round(new / steps, 4)})
        print(json.dumps(line | {"s": lines[-1]["s"]}), flush=True)
        given.out.write_text(json.dumps(lines, indent=1))

    folder = Path(tempfile.mkdtemp())
    plainly = str(base.path)
    s_of("others", "others", "table", lambda: Adaptive(rows=given.rows, table=plainly))
    for name in list(scenarios)[:-1]:
        texts = recorded(llm, chats(name, "first"), given.new_tokens)
        sequences = [[*text.prompt, *text.completion] for text in texts]
        places = places_of(texts)
        middle = given.weights[len(given.weights) // 2]
        forms = [("answers", weight) for weight in given.weights] + [("text", middle), ("best", middle)]
        files = {
            f"{form} {weight:g}": with_text(base, places[form], weight, folder / f"{name}-{form}-{weight}")
            for form, weight in forms
        }

        def matching(file: str) -> Any:
            drafter = Adaptive(rows=given.rows, table=file, sources=(*DEFAULT_SOURCES, "corpus"))
            state = AdaptiveState(drafter)
            for sequence in sequences:  # noqa: B023
                state.corpus.begin().feed(sequence)
            return replace(drafter, state=state)

        s_of(name, name, "table", lambda: Adaptive(rows=given.rows, table=plainly))
        chosen = f"answers {middle:g}"
        for questions in (name, "others"):
            for kept, file in files.items():
                if questions == name or kept == chosen:
                    s_of(name, questions, kept, lambda: Adaptive(rows=given.rows, table=file))  # noqa: B023
            s_of(name, questions, "matches", lambda: matching(plainly))
            s_of(name, questions, f"{chosen} + matches", lambda: matching(files[chosen]))  # noqa: B023


if __name__ == "__main__":
    main()
