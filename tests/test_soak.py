"""Short forms of the soak test, and proof that each can fail."""

import json
import os
import sys
import threading
import time
from pathlib import Path

import pytest

import soak
from processes import Command, forks, result_of

pytestmark = pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="memory is read from /proc")


def form(out, words):
    """Run it in a forked process, free of other tests' memory."""
    soak.torch.set_num_threads(2)
    os.dup2(os.open(out, os.O_WRONLY | os.O_CREAT), 1)
    os.dup2(1, 2)
    sys.argv = ["soak.py", *map(str, words)]
    soak.main()


def test_memory_is_flat_and_nothing_is_left_behind(tmp_path):
    page = tmp_path / "page.md"
    page.write_text("# A page\n")
    out = tmp_path / "out"
    process = forks().Process(target=form, args=(out, ["memory", "--count", 60, "--report", page]))
    process.start()
    process.join(280)
    assert process.exitcode == 0, out.read_text()
    assert page.read_text().startswith("# A page\n\n## Memory\n\n`python tests/soak.py memory --count 60`")


def test_long_texts_are_those_of_plain_decoding():
    found = soak.texts(300)
    assert not found.wrong, found.wrong


class Quick(Command):
    """The command that ``soak.kills`` starts, forked so that five starts do not import torch five times."""

    said = Path()

    def __init__(self, command):
        super().__init__(command[3:], stdout=os.devnull, stderr=self.said)

    def communicate(self, timeout=None):
        self.wait(timeout)
        return "", self.said.read_text()


def test_a_command_that_is_killed_loses_and_doubles_nothing(monkeypatch, tmp_path):
    monkeypatch.setattr(Quick, "said", tmp_path / "said")
    monkeypatch.setattr(soak, "_start", Quick)
    found = soak.kills(3)
    assert not found.wrong, found.wrong


def test_a_server_under_load_and_signals():
    found = soak.server(4, clients=16)
    assert not found.wrong, found.wrong
    assert "16 clients for 4 s" in found.facts[0]


def test_a_wrong_text_of_a_server_is_found(tmp_path):
    crowd, llm = soak.Crowd("", 0), soak.lookahead.load(soak.toy.save(tmp_path), dtype="float32")
    plain = llm.generate("x", max_new_tokens=3, drafter="off").text
    crowd.keep(("x", 0, 0, 3), plain)
    assert crowd.differences(llm) == []
    crowd.keep(("x", 0, 0, 3), f"{plain}y")
    crowd.keep(("x", 1, 1, 3), f"{plain}y")
    assert crowd.wrong == ["two texts for ('x', 0, 0, 3)"]
    assert len(crowd.differences(llm)) == 1


def wrong_with_leaks(folder):
    """What ``soak.memory`` finds wrong when every late generation leaves something behind."""
    soak.torch.set_num_threads(2)
    share = max(8, soak.resources()[0] // 20)
    kept = []

    def leak(number):
        if number >= 30:
            file = (folder / str(number)).open("w")
            kept.append((bytearray(b"x") * (share << 20), file, threading.Event()))
            threading.Thread(target=kept[-1][2].wait, daemon=True).start()

    def spin(seconds):
        end = time.process_time() + 0.2
        while time.process_time() < end:
            pass

    soak.time.sleep = spin
    return " ".join(soak.memory(40, leak).wrong)


def test_what_is_left_behind_is_found(tmp_path):
    # A process of its own, because memory that other tests left free would hide the growth.
    said = result_of(wrong_with_leaks, tmp_path, within=280)
    for what in ("MiB of memory", "threads", "open files", "processor time"):
        assert what in said


def test_a_wrong_token_in_a_long_text_is_found(accept_a_wrong_node):
    assert any("differs at token" in line for line in soak.texts(40).wrong)


@pytest.mark.parametrize("change", ["lost", "doubled", "another", "foreign"])
def test_a_damaged_output_is_found(change, tmp_path):
    out, whole = tmp_path / "out", tmp_path / "whole"
    lines = [json.dumps({"id": i, "line": i, "text": "a", "seconds": i}) + "\n" for i in range(1, 4)]
    whole.write_text("".join(lines))
    damaged = {
        "lost": lines[:2],
        "doubled": [*lines, lines[0]],
        "another": [*lines[:2], lines[2].replace('"a"', '"b"')],
        "foreign": [*lines, lines[2].replace('"line": 3', '"line": 4')],
    }
    for content, expected in ((reversed(lines), 0), (damaged[change], 1)):
        out.write_text("".join(content))
        found = soak.Findings()
        soak.compare(out, whole, found)
        assert len(found.wrong) == expected, found.wrong
