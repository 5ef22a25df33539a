"""The engine on a fake target: the queue, failures of one sequence and of a pass, and closing."""

import random
import threading

import pytest

from lookahead.core import Engine, LookaheadError, OutOfMemory, PassFailed, Request, SettingsError
from lookahead.core.prefix_cache import PrefixTarget, with_prefixes
from lookahead.drafters import Lookahead, Plain, PromptLookup
from lookahead.testing import FakeTarget, run
from lookahead.text.decoder import TextDecoder

VOCABULARY = 32


def requests(count, drafter=None, new=30, **more):
    rng = random.Random(5)
    prompts = [[rng.randrange(VOCABULARY) for _ in range(rng.randrange(1, 40))] for _ in range(count)]
    return [
        Request(prompt, drafter or Lookahead(5, 4, 5), new, tag=tag, **more)
        for tag, prompt in enumerate(prompts)
    ]


def plain_texts(count):
    return [run(FakeTarget(VOCABULARY), [request])[0].tokens for request in requests(count, Plain())]


def drain(engine):
    """Step until idle; return the results by tag."""
    results = {}
    while engine.busy:
        for update in engine.step():
            if update.result is not None:
                assert update.sequence.request.tag not in results, "two last updates"
                results[update.sequence.request.tag] = update.result
    return results


def make_engine(**options):
    return Engine(lambda: FakeTarget(VOCABULARY), **options)


@pytest.mark.parametrize("at_once", [1, 3, 100])
def test_sequences_wait_in_order_and_texts_are_those_of_plain_decoding(at_once):
    engine, begun = make_engine(max_sequences=at_once, prompt_rows=8, row_budget=24), []
    for request in requests(7):
        engine.add(request)
    assert (engine.running, engine.waiting) == (0, 7)
    results = {}
    while engine.busy:
        for update in engine.step():
            begun += [update.sequence.request.tag] if update.sequence.request.tag not in begun else []
            if update.result is not None:
                results[update.sequence.request.tag] = update.result
        assert engine.running <= at_once
    assert sorted(begun) == list(range(7))
    # A sequence begins before an earlier one only if its prompt is shorter and both were being evaluated.
    lengths = [len(request.prompt) for request in requests(7)]
    for place, tag in enumerate(begun):
        overtaken = set(range(tag)) - set(begun[:place])
        assert not overtaken or (
            at_once > 1 and lengths[tag] < min(lengths[earlier] for earlier in overtaken)
        )
    assert [results[tag].tokens for tag in range(7)] == plain_texts(7)
    assert all(result.finish_reason == "length" for result in results.values())


def test_sequences_may_join_and_leave_from_other_threads():
    engine, expected = make_engine(max_sequences=4), plain_texts(12)
    added, cancelled = [], False

    def join():
        for request in requests(12):
            added.append(engine.add(request))

    thread = threading.Thread(target=join)
    thread.start()
    results = {}
    while thread.is_alive() or engine.busy:
        results |= {u.sequence.request.tag: u.result for u in engine.step() if u.result is not None}
        if len(added) == 12 and not cancelled:
            engine.cancel(added[11])
            cancelled = True
    thread.join()
    assert [results[tag].tokens for tag in range(11)] == expected[:11]
    assert results[11].finish_reason == "cancelled"


def test_cancelled_sequences_keep_their_tokens_and_free_their_place():
    engine = make_engine(max_sequences=1)
    first, second, third = (engine.add(request) for request in requests(3))
    for _ in range(3):
        engine.step()
    engine.cancel(first)
    engine.cancel(second, LookaheadError("too late"))
    engine.cancel(first)
    results = drain(engine)
    assert results[0].finish_reason == "cancelled"
    assert results[0].tokens == plain_texts(3)[0][: len(results[0].tokens)]
    assert (results[1].finish_reason, results[1].tokens) == ("error", [])
    assert str(results[1].error) == "too late"
    assert results[2].tokens == plain_texts(3)[2]
    engine.cancel(third)  # already ended
    assert not engine.busy


class Broken(PromptLookup):
    """A drafter that fails in the given place."""

    def __init__(self, place, error):
        object.__setattr__(self, "place", place)
        object.__setattr__(self, "error", error)
        super().__init__()

    def start(self, sequence):
        if self.place == "start":
            raise self.error
        state = super().start(sequence)

        def fail(*given, **more):
            raise self.error

        def nonsense(*given, **more):
            return None

        if self.place == "tree":
            state.draft = nonsense
        elif self.place in ("draft", "observe", "overlap", "stats"):
            setattr(state, self.place, fail)
        return state


@pytest.mark.parametrize("error", [ValueError("on purpose"), LookaheadError("on purpose")], ids=repr)
@pytest.mark.parametrize("place", ["start", "draft", "tree", "observe", "overlap", "choose", "finished"])
def test_any_exception_of_one_sequence_ends_that_sequence_alone(place, error):
    def fail(*given):
        raise error

    made = requests(4)
    if place in ("choose", "finished"):
        setattr(made[1], place, fail)
    else:
        made[1].drafter = Broken(place, error)
    engine = make_engine(prompt_rows=8, row_budget=32)
    for request in made:
        engine.add(request)
    results = drain(engine)
    assert [results[tag].finish_reason for tag in range(4)] == ["length", "error", "length", "length"]
    assert [results[tag].tokens for tag in (0, 2, 3)] == [plain_texts(4)[tag] for tag in (0, 2, 3)]
    failed = results[1].error
    assert isinstance(failed, LookaheadError)
    if place == "tree":
        assert isinstance(failed.__cause__, TypeError)
    else:
        assert failed is error or failed.__cause__ is error
        assert ("ValueError: on purpose" if isinstance(error, ValueError) else "on purpose") in str(failed)
    assert engine.close().committed == {}


def test_statistics_that_fail_cost_no_completion():
    made = requests(4)
    made[1].drafter = Broken("stats", ValueError("on purpose"))
    engine = make_engine()
    for request in made:
        engine.add(request)
    with pytest.warns(RuntimeWarning, match="ValueError: on purpose; the completion is not affected"):
        results = drain(engine)
    assert [results[tag].tokens for tag in range(4)] == plain_texts(4)
    assert engine.close().committed == {}


def test_a_tokenizer_that_raises_ends_its_own_sequence():
    class Failing:
        def decode(self, tokens, **options):
            if len(tokens) > 4:
                raise KeyError("no such token")
            return "x" * len(tokens)

    engine = make_engine()
    for request in requests(3):
        request.detokenizer = TextDecoder(Failing()) if request.tag == 1 else None
        engine.add(request)
    results = drain(engine)
    assert [results[tag].finish_reason for tag in range(3)] == ["length", "error", "length"]
    assert "detokenization failed: KeyError" in str(results[1].error)


def test_a_failed_pass_ends_what_was_in_it_and_the_others_go_on():
    class Failing(FakeTarget):
        broken = False

        def forward(self, trees):
            if self.broken:
                raise RuntimeError("a pass that fails")
            return super().forward(trees)

    engine = Engine(lambda: Failing(VOCABULARY), max_sequences=2)
    for request in requests(5):
        engine.add(request)
    engine.step()
    engine.target.broken = True  # the next one works
    results = drain(engine)
    assert [results[tag].finish_reason for tag in range(5)] == [
        "error",
        "error",
        "length",
        "length",
        "length",
    ]
    assert all(isinstance(results[tag].error, PassFailed) for tag in (0, 1))
    assert isinstance(results[0].error.__cause__, RuntimeError)
    assert [results[tag].tokens for tag in (2, 3, 4)] == plain_texts(5)[2:]


class Letters:
    """A tokenizer: A is token 0, B is token 1, ..."""

    def decode(self, tokens, **options):
        return "".join(chr(65 + token) for token in tokens)


def counting(prefix):
    return (prefix[-1] + 1) % VOCABULARY


def counting_request(new=30, stops=(), **more):
    """A request of which every step emits several tokens."""
    text = TextDecoder(Letters(), (), list(stops))
    return Request([*range(VOCABULARY), 0], PromptLookup(), new, detokenizer=text, **more)


def updates_of(engine):
    """All updates, by sequence."""
    updates = {}
    while engine.busy:
        for update in engine.step():
            updates.setdefault(update.sequence, []).append(update)
    return updates


def tokens_of(updates):
    return [token for update in updates for token in update.tokens]


@pytest.mark.parametrize("stops", [(), ("never",)])
@pytest.mark.parametrize("place", ["choose", "finished"])
def test_tokens_before_an_error_in_the_same_step_are_part_of_the_update(place, stops):
    emitted = []

    def choose(scores, node):
        emitted.append(scores.best(node))
        if place == "choose" and len(emitted) == 16:
            raise ValueError("on purpose")
        return emitted[-1]

    def finished(token):
        if place == "finished" and len(emitted) == 15:
            raise ValueError("on purpose")

    engine = Engine(lambda: FakeTarget(VOCABULARY, counting))
    sequence = engine.add(counting_request(choose=choose, finished=finished, stops=stops))
    updates = updates_of(engine)[sequence]
    assert sequence.result.finish_reason == "error"
    assert sequence.result.tokens == list(range(1, 16)) == tokens_of(updates)
    assert sequence.result.text == "BCDEFGHIJKLMNOP" == "".join(update.piece for update in updates)
    last = updates[-1]
    assert len(last.path) == len(last.tokens) > 1
    assert [last.tree.tokens[node] for node in last.path[1:]] == last.tokens[:-1]
    assert sequence.stats.tokens_per_step.total() == len(updates) - 1


def test_tokens_of_a_step_whose_commit_fails_are_part_of_the_update():
    class Failing(FakeTarget):
        commits = 0

        def commit(self, paths):
            self.commits += 1
            if self.commits == 2:
                raise RuntimeError("a commit that fails")
            super().commit(paths)

    engine = Engine(lambda: Failing(VOCABULARY, counting))
    short, long = (engine.add(counting_request(new)) for new in (15, 40))
    updates = updates_of(engine)
    assert (short.result.finish_reason, long.result.finish_reason) == ("length", "error")
    assert isinstance(long.result.error, PassFailed)
    assert short.result.error is None
    assert short.result.text == "BCDEFGHIJKLMNOP"
    for sequence in (short, long):
        assert len(sequence.result.tokens) >= 15
        assert sequence.result.tokens == tokens_of(updates[sequence])
        assert sequence.result.text == "".join(update.piece for update in updates[sequence])


@pytest.mark.parametrize("call", ["prefill", "forward", "commit"])
def test_a_failed_pass_over_a_prompt_replaces_the_target(call):
    made = []

    def make():
        made.append(FakeTarget(VOCABULARY))
        return made[-1]

    def fail(*given):
        raise RuntimeError("a pass that fails")

    engine = Engine(make, max_sequences=2, prompt_rows=8)
    wanted = requests(4)
    for request in wanted:
        request.prompt = [*request.prompt, *range(10)]  # more than one chunk
    texts = [run(FakeTarget(VOCABULARY), [Request(r.prompt, Plain(), 30)])[0].tokens for r in wanted]
    for request in wanted:
        engine.add(request)
    setattr(made[0], call, fail)
    results = drain(engine)
    assert len(made) == 2
    assert isinstance(results[0].error, PassFailed)
    assert [results[tag].tokens for tag in (2, 3)] == texts[2:]


@pytest.mark.parametrize("error", [SettingsError("no such token"), OutOfMemory("too long")], ids=repr)
def test_a_prompt_that_the_target_refuses_ends_alone(error):
    class Refusing(FakeTarget):
        def prefill(self, prompts):
            scores = super().prefill(prompts)
            if prompts[0][1] == [7, 7]:
                raise error
            return scores

    target = Refusing(VOCABULARY)
    refused, fine = run(target, [Request([7, 7], Plain(), 5), Request([1, 2], Plain(), 5)])
    assert refused.error is error
    assert fine.finish_reason == "length"


def test_a_target_that_cannot_be_made_again_is_an_error_of_each_sequence():
    targets = [FakeTarget(VOCABULARY)]
    engine = Engine(lambda: targets.pop(), max_sequences=1)
    for request in requests(2):
        engine.add(request)
    engine.step()

    def fail(trees):
        raise RuntimeError("a pass that fails")

    engine.target.forward = fail
    results = drain(engine)
    assert [results[tag].finish_reason for tag in range(2)] == ["error", "error"]
    assert "starting the request failed: IndexError" in str(results[1].error)


def test_an_interrupted_step_leaves_no_target_to_go_on_with():
    engine = make_engine()
    engine.add(requests(1)[0])
    engine.step()
    assert make_engine().close() is not None

    def interrupt(trees):
        raise KeyboardInterrupt

    engine.target.forward = interrupt
    with pytest.raises(KeyboardInterrupt):
        engine.step()
    assert engine.close() is None
    assert engine.close() is None


def test_an_engine_goes_on_with_the_target_of_another_one():
    class Keeping(FakeTarget):
        keeps_prefixes = True

        def reuse(self, slot, source, length):
            self.committed[slot] = self.committed[source][:length]

        def prefill(self, prompts):
            for slot, _ in prompts:
                self.committed.pop(slot, None)
            return super().prefill(prompts)

    def make():
        return Keeping(VOCABULARY)

    prompt = [3, 4, 5, 6, 7, 8]
    engine = Engine(lambda: with_prefixes(make(), 2))
    engine.add(Request(prompt, Plain(), 5))
    drain(engine)
    target = engine.close()
    assert isinstance(target, PrefixTarget)
    engine = Engine(lambda: with_prefixes(make(), 2), target=target)
    sequence = engine.add(Request([*prompt, 9], Plain(), 5))
    drain(engine)
    assert sequence.cached == len(prompt)


def test_stop_strings_of_a_text_end_the_sequence():
    (request,) = requests(1)
    whole = "".join(chr(65 + token) for token in plain_texts(1)[0])
    stop = whole[9:11]
    engine = make_engine()
    request.detokenizer = TextDecoder(Letters(), (), [stop])
    engine.add(request)
    result = drain(engine)[0]
    assert (result.finish_reason, result.stopped) == ("stop", stop)
    assert result.text == whole[: whole.index(stop)]


def test_sequences_beyond_those_of_the_target_wait():
    target = FakeTarget()
    target.max_sequences = 2
    engine = Engine(lambda: target, target=target)
    sequences = [engine.add(Request([1, number], Plain(), 5)) for number in range(5)]
    most = 0
    while engine.busy:
        engine.step()
        most = max(most, engine.running)
    assert most == 2
    assert [sequence.finish_reason for sequence in sequences] == ["length"] * 5
