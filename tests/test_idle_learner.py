"""--learn-when-idle: another process runs while there are no requests, and stops at once when one arrives."""

import json
import logging
import signal
from pathlib import Path
from time import monotonic, sleep

import httpx
import pytest

import lookahead
from lookahead.core import SettingsError
from lookahead.learning import idle
from lookahead.options import LoadOptions
from lookahead.server import engine_thread, idle_learner
from lookahead.server.idle_learner import IdleLearner
from serving import Served, serving
from toy import save

#: Counts in the file that it is given as the model, as fast as it can, until its parent has ended.
COUNTS = """
import json, os, sys
with open(json.loads(sys.argv[1])["path_or_id"], "r+b", 0) as file:
    number, parent = 0, os.getppid()
    while os.getppid() == parent:
        number += 1
        file.seek(0)
        file.write(b"%d" % number)
"""


@pytest.fixture
def file(tmp_path, monkeypatch):
    """The file in which the process counts."""
    monkeypatch.setattr(idle_learner, "PROGRAM", COUNTS)
    monkeypatch.setattr(idle_learner, "IDLE_SECONDS", 0.1)
    monkeypatch.setattr(engine_thread, "IDLE_SECONDS", 0.1)
    (tmp_path / "count").write_text("0")
    return tmp_path / "count"


def goes_on(file):
    """Whether the process counts on."""
    before = file.read_bytes()
    sleep(0.2)
    return file.read_bytes() != before


def test_it_runs_only_without_requests_and_stops_within_50_ms(file):
    learner = IdleLearner(LoadOptions(path_or_id=str(file)), "cpu")
    learner.resume()
    assert learner._process is None, "the server has just started"
    sleep(0.15)
    learner.resume()
    Served.wait(lambda: file.read_text() != "0")
    for _ in range(3):
        begin = monotonic()
        learner.pause()
        stopped = _stopped(learner._process.pid, begin)
        assert stopped < 0.05
        learner.resume()
        assert not goes_on(file), "a request has just arrived"
        learner.resume()
        assert goes_on(file)
    learner.pause()
    learner.close()
    assert learner._process.returncode == -signal.SIGKILL
    learner.resume()
    assert learner._process.returncode is not None, "it does not start again"


def _stopped(process, begin):
    """The seconds until a process is stopped."""
    while Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] != "T":
        assert monotonic() - begin < 5
    return monotonic() - begin


def test_the_end_of_the_process_is_one_line(monkeypatch, caplog, capfd):
    monkeypatch.setattr(idle_learner, "PROGRAM", "import sys; sys.exit('no room on the disk')")
    monkeypatch.setattr(idle_learner, "IDLE_SECONDS", 0.0)
    caplog.set_level(logging.INFO, "lookahead.server")
    learner = IdleLearner(LoadOptions(), "cpu")
    learner.resume()
    learner._process.wait(60)
    for _ in range(3):
        learner.resume()
    assert [record.getMessage() for record in caplog.records] == [
        "learning while idle has ended with status 1"
    ]
    assert capfd.readouterr().err == "no room on the disk\n"
    learner.close()


def test_it_is_refused_where_it_cannot_be_stopped_or_would_fill_a_gpu():
    with pytest.raises(SettingsError, match=r"learn_when_idle needs a model on the CPU .* got cuda:0 on"):
        IdleLearner(LoadOptions(), "cuda:0")


def test_a_server_stops_it_for_a_request_and_ends_it(file, tmp_path, monkeypatch):
    signals = []
    send = IdleLearner._signal
    monkeypatch.setattr(IdleLearner, "_signal", lambda self, name: (signals.append(name), send(self, name)))
    llm = lookahead.load(save(tmp_path / "toy", chat=True, max_position_embeddings=256))
    with serving(llm, learn_when_idle=True, model=str(file)) as served:
        learner = served.server.loop._learner
        for _ in range(2):
            Served.wait(lambda: learner._runs and goes_on(file))
            body = {"prompt": "the cat", "max_tokens": 8, "temperature": 0}
            reply = httpx.post(f"{served.url}/v1/completions", json=body, timeout=60)
            assert reply.status_code == 200
            assert "SIGSTOP" in signals, "for this request"
            signals.clear()
    assert "SIGKILL" in signals
    assert learner._process.returncode == -signal.SIGKILL


def test_it_learns_in_steps_until_there_is_enough_text(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(idle, "STEP", 100)
    monkeypatch.setattr(idle, "MOST", 250)
    monkeypatch.setattr("lookahead.learning.self_text.BATCH", 2)
    monkeypatch.setattr("lookahead.learning.self_text.LONGEST", 16)
    folder = save(tmp_path / "toy", chat=True, max_position_embeddings=512)
    built = []
    build = idle.Learner.build
    monkeypatch.setattr(idle.Learner, "build", lambda self: built.append(build(self).learned))
    idle.main(json.dumps({"path_or_id": str(folder)}))
    assert len(built) > 1
    assert built == sorted(built)
    assert built[-2] < 250 <= built[-1]
    with pytest.raises(SystemExit, match="nowhere"):
        idle.main(json.dumps({"path_or_id": str(tmp_path / "nowhere")}))
