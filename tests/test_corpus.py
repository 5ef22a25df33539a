"""The corpus of model-written text: requests, answers by a tiny model, the filter, and text from a table."""

import json
import lzma
import re
from itertools import islice

import pytest

import lookahead
from benchmarks.corpus.from_table import LENGTH, chains_of
from benchmarks.corpus.pack import kept, pack, without_loop
from benchmarks.corpus.requests import KINDS, LISTS, asks
from benchmarks.corpus.write import TEMPERATURE, read, write
from lookahead.drafters import Plain
from lookahead.drafters.adaptive.base_files import INCLUDED
from lookahead.drafters.adaptive.sources.base_table import ABSENT, candidate, find_entry, open_table


@pytest.mark.parametrize("writer", ["smollm2", "qwen"])
def test_requests_are_complete_and_different(writer: str) -> None:
    first = list(islice(asks(writer), 3000))
    assert first == list(islice(asks(writer), 3000))
    assert len({ask.text for ask in first}) == 3000
    assert {ask.kind for ask in first} == {name for name, kind in KINDS.items() if kind["weights"][writer]}


def test_every_field_has_a_list() -> None:
    fields = {
        name for kind in KINDS.values() for frame in kind["frames"] for name in re.findall(r"{(\w+)}", frame)
    }
    assert fields == {*LISTS, "a", "b", "c"}


def text(number: int, answer: str) -> dict[str, object]:
    return {
        "writer": "smollm2",
        "number": number,
        "kind": "explain",
        "tokens": 9,
        "answer": answer,
        "end": "stop",
    }


def test_answers_are_those_of_plain_decoding_and_go_on_after_a_cut_line(tmp_path, monkeypatch) -> None:
    monkeypatch.setattr("benchmarks.corpus.write.LONGEST", 40)
    llm = lookahead.load("tiny")
    llm.tokenizer.chat_template = "{{ messages[0].content }}"
    out = tmp_path / "out.jsonl"
    requests = list(islice(asks("smollm2"), 5))
    write(llm, "smollm2", requests[:2], out, batch=2)
    first = out.read_bytes()
    out.write_bytes(first + b'{"cut": ')
    write(llm, "smollm2", requests, out, batch=2)
    assert out.read_bytes().startswith(first)
    lines = {line["number"]: line for line in read(out)}
    assert len(lines) == len(read(out)) == 5
    for ask in requests:
        sampling = {"temperature": TEMPERATURE, "seed": ask.number} if ask.number % 2 else {}
        chat = [{"role": "user", "content": ask.text}]
        plain = llm.generate(chat, max_new_tokens=40, drafter=Plain(), **sampling)
        tokens = plain.tokens[: lines[ask.number]["tokens"]]
        assert llm.tokenizer.decode(tokens, skip_special_tokens=True) == lines[ask.number]["answer"]


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ("A list: one and two, one and two, one and two, one", "A list: one and two,"),
        ("Two of these lines. Two of these lines.", "Two of these lines. Two of these lines."),
        ("And then...", "And then..."),
        ("", ""),
    ],
)
def test_an_ending_that_repeats_is_kept_once(given: str, expected: str) -> None:
    assert without_loop(given) == expected


def test_repeated_and_damaged_answers_are_dropped(tmp_path) -> None:
    bees = (
        "Bees live in hives and collect nectar from the flowers of many meadows, which they turn into honey."
    )
    tides = "The tides follow the moon, because its gravity pulls more on the near side of the sea than on the far."
    texts = [
        text(5, tides),
        text(2, bees),
        text(3, bees + " That is all."),
        text(4, tides + "\ufffd"),
        text(6, "Too short."),
        text(7, "".join(f"{i} green bottles on the wall. " for i in range(40))),
    ]
    chosen = list(kept(texts))
    assert [found["number"] for found in chosen] == [2, 5]
    assert all("end" not in found for found in chosen)

    # The packed file does not depend on the order, and is read again.
    file = tmp_path / "corpus.jsonl.xz"
    file.write_bytes(pack(chosen))
    assert pack(reversed(chosen)) == file.read_bytes()
    assert (
        read(file) == [json.loads(line) for line in lzma.decompress(file.read_bytes()).splitlines()] == chosen
    )


def test_chains_follow_the_entries_of_a_table() -> None:
    (file,) = INCLUDED.glob("*.safetensors")
    trie = open_table(file).trie
    chains = chains_of(trie, 20, seed=0)
    assert chains.shape == (20, LENGTH + 1)
    assert (chains == chains_of(trie, 20, seed=0)).all()
    followed = 0
    for chain in chains.tolist():
        tokens = [-1, -1, *chain[: chain.index(-1)]] if -1 in chain else [-1, -1, *chain]
        for before, previous, last, following in zip(
            tokens, tokens[1:], tokens[2:], tokens[3:], strict=False
        ):
            node = find_entry(trie, before, previous, last)
            assert following in [
                candidate(trie, node, i) for i in range(trie.logs.shape[1]) if trie.logs[node, i] != ABSENT
            ]
            followed += 1
    assert followed > 1000
