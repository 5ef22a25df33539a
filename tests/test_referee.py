"""``lookahead verify --url``: differences between servers, and what they are called."""

import json
import random
import re
import subprocess
import sys
import threading
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from time import sleep

import pytest

import lookahead
from lookahead.cli.findings import show
from lookahead.referee import (
    BOUND,
    Completion,
    Finding,
    Report,
    Token,
    Verdict,
    judge,
    p_value,
    spread,
    status,
)
from serving import serving
from test_cli import call
from toy import save

WORDS = ("the", " quick", " brown", " fox")


# ------------------------------------------------------------------------------------------ a server that answers so


class Stub:
    """A server whose answers are given.

    Attributes:
        answer: (path, request) -> (status, body); a body that is not a string becomes JSON.
        requests: the requests so far.
    """

    def __init__(self, answer):
        self.answer = answer
        self.requests = []
        stub = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self):
                self._send(200, {"data": [{"id": "stub-model"}]})

            def do_POST(self):
                request = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                stub.requests.append(request | {"authorization": self.headers["Authorization"]})
                self._send(*stub.answer(self.path, request))

            def _send(self, code, body):
                data = (body if isinstance(body, str) else json.dumps(body)).encode()
                self.send_response(code)
                self.send_header("Content-Length", str(len(data)))
                self.send_header("Location", "/elsewhere")
                self.end_headers()
                self.wfile.write(data)

            def log_message(self, *_):
                pass

        self.http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.http.server_port}"


@contextmanager
def stubbed(answer):
    stub = Stub(answer)
    thread = threading.Thread(target=stub.http.serve_forever, args=(0.01,))
    thread.start()
    try:
        yield stub
    finally:
        stub.http.shutdown()
        thread.join()
        stub.http.server_close()


def completion(words, others=(), finish="length", logprobs=True):
    """The body of a completion.

    Args:
        others: (index, word, gap) of the second best token; elsewhere it is far away.
    """
    tops = [{word: -0.5, " far": -9.0} for word in words]
    for index, word, gap in others:
        tops[index] = {words[index]: -0.5, word: -0.5 - gap}
    lists = {
        "tokens": list(words),
        "token_logprobs": [-0.5] * len(words),
        "top_logprobs": tops,
        "text_offset": [100 + sum(map(len, words[:i])) for i in range(len(words))],
    }
    choice = {"index": 0, "text": "".join(words), "finish_reason": finish}
    choice["logprobs"] = lists if logprobs else None
    return {"choices": [choice], "usage": {"completion_tokens": len(words)}}


def tie(gap, other=(*WORDS[:2], " red", " fox")):
    """Answers WORDS, or ``other`` if the request says so, with a gap between the two at the third token."""

    def answer(path, request):
        if request.get("speculate"):
            return 200, completion(other)
        return 200, completion(WORDS, [(2, " red", gap)], logprobs="logprobs" in request)

    return answer


def verify(*words):
    code, out, err = call("verify", "--prompt", "x", *words)
    return code, out, err


SWITCH = ("--with", '{"speculate": true}')


# ------------------------------------------------------------------------------------ what a difference is called


@pytest.mark.parametrize(
    ("gap", "more", "verdict", "code"),
    [
        (0.001, (), "rounding", 0),
        (0.001, ("--strict",), "rounding", 1),
        (0.001, ("--bound", 0.0001), "wrong", 2),
        (BOUND + 0.01, (), "wrong", 2),
        (3.0, ("--bound", 4), "rounding", 0),
    ],
)
def test_a_difference_is_judged_by_the_gap(gap, more, verdict, code):
    with stubbed(tie(gap)) as stub:
        got, out, err = verify("--url", stub.url, *SWITCH, *more, "--json")
        assert (got, err) == (code, "")
        report = json.loads(out)
    (found,) = report["prompts"]
    assert (found["verdict"], found["first_divergence"], found["equal"]) == (verdict, 2, False)
    assert found["gap"] == pytest.approx(gap)
    assert (found["before"], found["plain_token"], found["other_token"]) == ("the quick", " brown", " red")
    assert (found["plain"], found["other"]) == (" brown fox", " red fox")
    assert (report["model"], report["equal"], report["runs"], report["tokens"]) == ("stub-model", 0, 1, 4)


def test_the_table_shows_both_tokens():
    with stubbed(tie(2.0)) as stub:
        code, out, _ = verify("--url", f"{stub.url}/v1/", *SWITCH)
    assert code == 2
    assert "wrong: …'the quick' then plain ' brown', other ' red'" in out
    assert "1 wrong, of 1 prompts and 4 tokens: stub-model, with and without fields" in out


def test_the_table_shows_p_only_if_sampled(capsys):
    show([Finding("x", Verdict.ALIKE, 4, p=0.25), Finding("y", Verdict.EQUAL)])
    header, one, two = capsys.readouterr().out.splitlines()
    assert header.split()[-1] == "p"
    assert (one.split(), two.split()) == (["x", "alike", "4", "0.25"], ["y", "equal"])
    show([Finding("y", Verdict.EQUAL)])
    assert capsys.readouterr().out.split()[-3:] == ["gap", "y", "equal"]


def test_the_other_side_is_not_asked_for_log_probabilities():
    with stubbed(tie(2.0)) as stub:
        verify("--url", stub.url, *SWITCH, "--api-key", "k", "--max-new-tokens", 7)
        plain, again, other = stub.requests
    assert plain == again
    assert plain["logprobs"] == 5
    assert "logprobs" not in other
    for request in stub.requests:
        assert (request["max_tokens"], request["temperature"], request["model"]) == (7, 0.0, "stub-model")
        assert request["authorization"] == "Bearer k"


def test_noise_of_plain_runs_widens_the_bound():
    """The second plain run has other log-probabilities by 0.4, so a gap of 0.7 may be rounding."""

    def answer(path, request):
        body = tie(0.7)(path, request)[1]
        lists = body["choices"][0]["logprobs"]
        if lists and len(seen) == 1:
            lists["token_logprobs"][0] -= 0.4
        seen.append(1)
        return 200, body

    seen = []
    with stubbed(answer) as stub:
        code, out, _ = verify("--url", stub.url, *SWITCH, "--json")
    report = json.loads(out)
    assert (code, report["noise"], report["bound"]) == (0, pytest.approx(0.4), pytest.approx(0.8))
    assert report["prompts"][0]["verdict"] == "rounding"


def test_a_plain_side_that_does_not_repeat_itself_is_no_judge():
    def answer(path, request):
        seen.append(1)
        words = WORDS if len(seen) != 2 else (*WORDS[:2], " cat")
        return 200, completion(words if len(seen) < 3 else ("other",))

    seen = []
    with stubbed(answer) as stub:
        code, out, _ = verify("--url", stub.url, *SWITCH)
    assert code == 3
    assert "the plain side does not repeat its own text" in out


def test_the_same_server_twice_and_with_others():
    def answer(path, request):
        with lock:
            now[0] += 1
            most[0] = max(most[0], now[0])
        if len(stub.requests) > 4:  # those of the batch: none is answered until all six are there
            six.wait(30)
        sleep(0.05)
        with lock:
            now[0] -= 1
        return 200, completion(WORDS)

    lock, now, most, six = threading.Lock(), [0], [0], threading.Barrier(6)
    with stubbed(answer) as stub:
        code, out, _ = verify("--url", stub.url, "--repeat")
        assert (code, most[0], len(stub.requests)) == (0, 1, 2)
        assert "the same server twice" in out
        code, out, _ = verify("--url", stub.url, "--batch", 6)
        assert (code, most[0], len(stub.requests)) == (0, 6, 10)
        assert "alone and among 6 at once" in out


def test_two_servers_each_with_its_own_name():
    with stubbed(tie(2.0)) as plain, stubbed(lambda *_: tie(2.0)("", {"speculate": 1})) as other:
        code, _, _ = verify("its-name", "--url", other.url, "--against", plain.url)
        assert code == 2
        assert {request["model"] for request in plain.requests} == {"stub-model"}
        assert {request["model"] for request in other.requests} == {"its-name"}


def test_chats_and_token_ids(tmp_path):
    def answer(path, request):
        paths.append((path, request.get("top_logprobs")))
        if path == "/v1/completions":
            return 200, completion(WORDS)
        text = "für" if "logprobs" in request else "fun"
        content = [
            {"token": "f", "bytes": [102], "logprob": -0.1, "top_logprobs": []},
            {
                **{"token": "\ufffd", "bytes": [195], "logprob": -0.1},
                "top_logprobs": [{"token": "\ufffd", "logprob": -0.1}, {"token": "un", "logprob": -0.2}],
            },
            {"token": "\ufffd", "bytes": [188], "logprob": -0.1, "top_logprobs": []},
            {"token": "r", "bytes": None, "logprob": -0.1, "top_logprobs": []},
        ]
        logprobs = {"content": content} if "logprobs" in request else None
        return 200, {
            "choices": [{"message": {"content": text}, "finish_reason": "length", "logprobs": logprobs}]
        }

    paths = []
    source = tmp_path / "in.jsonl"
    source.write_text('{"messages": [{"role": "user", "content": "hi"}]}\n{"input_ids": [4, 5]}\n')
    with stubbed(answer) as stub:
        code, out, _ = call("verify", "--url", stub.url, "--input", source, "--repeat", "--json")
    assert code == 0
    chat, ids = json.loads(out)["prompts"]
    assert (chat["verdict"], chat["first_divergence"], chat["other_token"]) == ("rounding", 1, "un")
    assert (ids["verdict"], ids["prompt"]) == ("equal", "2 token ids")
    assert ("/v1/chat/completions", 5) in paths


# ------------------------------------------------------------------------------------------ the judge alone


def tokens_of(*entries):
    """Tokens (text, {other: gap})."""
    found, start = [], 0
    for text, others in entries:
        top = [(text, -1.0), *((name, -1.0 - gap) for name, gap in others.items())]
        found.append(Token(text, start, -1.0, top))
        start += len(text)
    return found


def judged(plain, other, finish=("length", "length")):
    text = "".join(token.text for token in plain)
    return judge("", Completion(text, finish[0], 9, plain), Completion(other, finish[1], 9, []), BOUND)


@pytest.mark.parametrize(
    ("entries", "other", "verdict", "index", "gap", "name"),
    [
        # The other token spells the plain one and more: it differs at the plain token.
        ([("the", {"theory": 0.1}), ("re", {"y": 5})], "theory", "rounding", 1, 0.1, "theory"),
        # None of the likely tokens fits: the gap is at least that of the last.
        ([("a", {}), ("b", {"c": 0.1, "d": 2.0})], "ax", "wrong", 1, 2.0, None),
        ([("a", {}), ("b", {"c": 0.1})], "ax", "not judged", 1, 0.1, None),
        ([("a", {}), ("b", {})], "ax", "not judged", 1, None, None),
        # A part of a character may be any character.
        ([("a", {}), ("b", {"\ufffd": 0.1})], "aü", "rounding", 1, 0.1, "\ufffd"),
        # The other text ends here.
        ([("a", {}), ("b", {"</s>": 0.1})], "a", "rounding", 1, 0.1, "</s>"),
        ([("a", {}), ("b", {"": 4.0})], "a", "wrong", 1, 4.0, ""),
    ],
)
def test_the_token_that_differs(entries, other, verdict, index, gap, name):
    found = judged(tokens_of(*entries), other)
    assert (found.verdict, found.first_divergence, found.other_token) == (verdict, index, name)
    assert found.gap == (None if gap is None else pytest.approx(gap))
    assert found.at_least == (gap is not None and name is None)


def test_a_text_that_ends_differs_from_one_that_is_cut():
    plain = [*tokens_of(("a", {})), Token("", 1, -1.0, [("", -1.0), ("b", -3.0)])]
    found = judged(plain, "ab", ("stop", "length"))
    assert (found.verdict, found.first_divergence, found.gap) == ("wrong", 1, pytest.approx(2.0))
    assert judged(plain, "a", ("stop", "stop")).verdict == "equal"
    assert judged(tokens_of(("a", {})), "a", ("stop", "length")).verdict == "not judged"


def test_spread_ends_where_the_tokens_differ():
    one = Completion("", None, None, [Token("a", 0, -1.0, []), Token("b", 1, -1.0, [])])
    other = Completion("", None, None, [Token("a", 0, -1.5, []), Token("c", 1, -9.0, [])])
    assert spread(one, other) == 0.5


def test_exit_status():
    assert status([Verdict.EQUAL, Verdict.ALIKE]) == 0
    assert (status([Verdict.ROUNDING]), status([Verdict.ROUNDING], strict=True)) == (0, 1)
    assert status([Verdict.ROUNDING, Verdict.NOT_JUDGED], strict=True) == 3
    assert status([Verdict.NOT_JUDGED, Verdict.WRONG]) == 2
    assert Finding("x", Verdict.EQUAL).as_dict()["equal"] is True


def test_the_test_of_distributions():
    random_ = random.Random(1)

    def draw(*weights):
        return ["".join(random_.choices("abcd", weights, k=3)) for _ in range(200)]

    equal = [p_value(draw(5, 3, 1, 1), draw(5, 3, 1, 1)) for _ in range(12)]
    assert min(equal) > 1e-3
    assert sum(p < 0.5 for p in equal) in range(2, 11)
    assert p_value(draw(5, 3, 1, 1), draw(3, 5, 1, 1)) < 1e-3
    assert p_value(["a"] * 10, ["a"] * 10) == 1.0


# ------------------------------------------------------------------------------------------ odd servers


def without_logprobs(path, request):
    if "logprobs" in request:
        return 400, {"error": {"message": "logprobs are not supported"}}
    return 200, completion(WORDS if not request.get("speculate") else ("no",), logprobs=False)


def silent(path, request):
    sleep(0.5)
    return 200, completion(WORDS)


@pytest.mark.parametrize(
    ("answer", "says"),
    [
        (lambda *_: (500, {"error": {"message": "out of\nmemory"}}), "answered 500: out of memory"),
        (lambda *_: (400, {"error": "no such model"}), "answered 400: no such model"),
        (lambda *_: (404, "<html>"), "/v1/completions answered 404: <html>"),
        (lambda *_: (302, ""), "answered 302: no message"),
        (lambda *_: (200, "<html>"), "must answer JSON, and answered something else"),
        (lambda *_: (200, {"choices": []}), "must answer as OpenAI's API does"),
        (lambda *_: (200, {"choices": [{"text": "a", "logprobs": {"tokens": ["a"]}}]}), "cannot be read"),
        (lambda *_: (200, []), "cannot be read"),
        (silent, "must answer within 0.1 s, and did not"),
    ],
)
def test_an_odd_server_is_one_line(answer, says):
    with stubbed(answer) as stub:
        code, out, err = verify("--url", stub.url, "--timeout", 0.1 if answer is silent else 20)
    assert (code, out) == (3, "")
    assert says in err
    assert err.startswith("error: ")
    assert err.count("\n") == 1


def test_a_server_without_log_probabilities_is_not_judged():
    with stubbed(without_logprobs) as stub:
        code, out, _ = verify("--url", stub.url, *SWITCH)
        assert code == 3
        assert "not judged" in out
        assert "no log-probabilities" in out
        code, out, _ = verify("--url", stub.url, "--repeat")
        assert (code, "1 equal, of 1 prompts" in out) == (0, True)


def test_no_server_and_no_model():
    with stubbed(silent) as stub:
        pass
    code, _, err = verify("--url", stub.url)
    assert (code, "cannot be reached" in err) == (3, True)


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (("--url", "localhost:8000"), "a server's address must be like http://localhost:8000"),
        (("--url", "http://x", "--drafter", "off"), "--drafter cannot be given with --url"),
        (
            ("--url", "http://x", "--top-k", 4, "--temperature", 1),
            "--top-k cannot be given, because OpenAI's API has no",
        ),
        (
            ("--url", "http://x", "--with", "[1]"),
            r"--with must be a JSON object of request fields, got '\[1\]'",
        ),
        (("--url", "http://x", "--repeat", "--batch", 4), "--batch and --repeat cannot be given together"),
        (("--against", "http://x"), "--against needs --url"),
        (("--repeat",), "--repeat needs --url"),
        (("--input", "x.jsonl"), "--prompt and --input cannot be given together"),
    ],
)
def test_contradictory_options(words, says):
    code, _, err = verify(*words)
    assert code == 2
    assert re.search(says, err), err


# ------------------------------------------------------------------------------------------ our own server


@pytest.fixture(scope="module")
def served(tmp_path_factory):
    folder = save(tmp_path_factory.mktemp("toy"), chat=True, max_position_embeddings=512)
    with serving(lookahead.load(folder, dtype="float32"), max_concurrent=16, max_queue=64) as running:
        yield running


PLAIN = ("--without", '{"lookahead": {"drafter": "plain"}}', "--max-new-tokens", 32)


def test_our_server_is_equal(served):
    code, out, err = call("verify", "--url", served.url, *PLAIN)
    assert (code, err) == (0, "")
    assert "8 equal, of 8 prompts" in out
    code, out, _ = call("verify", "--url", served.url, "--max-new-tokens", 16)
    assert (code, "alone and among 16 at once" in out) == (0, True)


def test_a_fault_in_verification_is_found(served, accept_a_wrong_node):
    code, out, _ = call("verify", "--url", served.url, *PLAIN, "--json")
    assert code == 2
    wrong = [found for found in json.loads(out)["prompts"] if found["verdict"] == "wrong"]
    assert wrong
    assert all(found["gap"] > BOUND and found["first_divergence"] >= 1 for found in wrong)


def test_sampled_with_seeds(served):
    code, out, _ = call("verify", "--url", served.url, *PLAIN, "--temperature", 0.8, "--seed", 3)
    assert (code, "8 equal" in out) == (0, True)


@pytest.mark.parametrize(("weights", "verdict", "code"), [((5, 3, 2), "alike", 0), ((2, 3, 5), "wrong", 2)])
def test_sampled_without_seeds_compares_distributions(weights, verdict, code):
    """The stub ignores seeds."""
    random_ = random.Random(7)

    def answer(path, request):
        own = weights if request.get("speculate") else (5, 3, 2)
        return 200, completion(random_.choices(["a", "b", "c"], own, k=4))

    with stubbed(answer) as stub:
        got, out, _ = verify("--url", stub.url, *SWITCH, "--temperature", 1, "--samples", 60, "--json")
        seeds = [request["seed"] for request in stub.requests]
    (found,) = json.loads(out)["prompts"]
    assert (got, found["verdict"]) == (code, verdict)
    assert len(set(seeds)) == 121  # the same seed for the texts, then another for each sample


def test_the_server_needs_no_torch():
    script = "import sys, lookahead.referee; assert not {'torch', 'transformers'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", script], check=True)


def test_the_page_counts_the_findings_of_each_engine() -> None:
    from benchmarks.text import figures_of, table

    right = Completion(
        "ab", "length", 2, [Token("a", 0, -0.1, []), Token("b", 1, -0.5, [("b", -0.5), ("c", -0.6)])]
    )
    findings = [judge("x", right, Completion(text, "length", 2, []), BOUND) for text in ("ab", "ac")]
    found = figures_of(Report(findings, BOUND))
    assert found["counts"] == {"equal": 1, "rounding": 1}
    assert [each["verdict"] for each in found["findings"]] == ["rounding"]
    assert "| engine | plain, twice | 1 | 1 | 0 | 0 | 0.1 |" in table({"engine": {"plain, twice": found}})


@pytest.mark.parametrize(("least", "verdict"), [(-0.1, "wrong"), (-0.3, "rounding")])
def test_an_engine_that_is_off_by_much_in_float32_has_a_wider_bound(least: float, verdict: str) -> None:
    """Its own log-probabilities are unknown: a gap of 0.5 is rounding if another one is -0.3."""
    from benchmarks.text import judged_by_reference

    def pair(gap: float) -> tuple[str, Completion, Completion]:
        tokens = [Token("a", 0, -0.5, [("b", -0.5 - gap), ("a", -0.5), ("c", -9.0)])]
        return "x", Completion("a", "length", 1, tokens), Completion("b", "length", 1, [])

    report = judged_by_reference([pair(least), pair(0.5)])
    assert [each.verdict for each in report.findings] == ["rounding", verdict]
    assert report.noise == pytest.approx(-least)
