"""Sampled tokens have the model's own probabilities while drafts are made, verified and learnt from.

One forward pass over a finished completion gives the exact distribution p of each token given its prefix.
Over many completions, let O_k count how often the k-th likeliest token was drawn. Whatever the completions,
O - E with E_k = sum p_k has mean zero and covariance C = sum (diag(p) - p p^T), so (O - E)^T C^-1 (O - E) is
chi-square with V - 1 degrees of freedom. The same is true of counts of the tokens themselves, and of drafted
and undrafted tokens, if the drafter has no access to the noise. Seeds are fixed and steps have a fixed number
of rows, so nothing depends on the clock.
"""

import importlib
import random
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

import lookahead
from lookahead.drafters import Adaptive
from lookahead.hf.testing import tiny_model

pytestmark = pytest.mark.slow

VOCABULARY, NEW, TEXTS = 6, 24, 300
#: Skipped tokens: the prefill draws the first one, and the second is hardly ever drafted.
SKIPPED = 2
PROMPT = [3, 4, 5, 3, 4, 5, 1, 3, 4, 5, 2, 3, 4]
DRAFTER = Adaptive(rows=16)
#: Probability of a rejection by chance, in each comparison.
LEVEL = 1e-3


@pytest.fixture(scope="module")
def model():
    made = tiny_model("llama", vocab_size=VOCABULARY, initializer_range=0.1, eos_token_id=None)
    made.generation_config.eos_token_id = None
    return made


@pytest.fixture(scope="module")
def llm(model):
    return lookahead.LLM(model, drafter=DRAFTER)


def chi_square(drawn, p):
    """p-value of the counts of one-hot ``drawn`` (n, V), given each draw's probabilities ``p`` (n, V)."""
    apart = (drawn - p).sum(0)[:-1]  # the last count follows from the others
    covariance = (torch.diag(p.sum(0)) - p.T @ p)[:-1, :-1]
    statistic = apart @ torch.linalg.solve(covariance, apart)
    return float(torch.special.gammaincc(torch.tensor(len(apart) / 2).double(), statistic / 2))


def draws(texts, model, temperature):
    """One-hot drawn tokens and their distributions, both (n, V), with a row per token that is not skipped."""
    ids = torch.tensor([PROMPT + text for text in texts])
    with torch.no_grad():
        logits = model(input_ids=ids[:, :-1]).logits[:, SKIPPED - NEW :].double()
    drawn = torch.nn.functional.one_hot(ids[:, SKIPPED - NEW :].flatten(), VOCABULARY).double()
    return drawn, (logits / temperature).softmax(-1).flatten(0, 1)


def p_values(texts, model, temperature):
    """p-values (by rank, by token)."""
    drawn, p = draws(texts, model, temperature)
    ranks = p.argsort(-1, descending=True)
    return chi_square(drawn.gather(1, ranks), p.gather(1, ranks)), chi_square(drawn, p)


def sampled(llm, temperature, warm):
    """Completions for seeds 0, 1, 2 ..., and the mean number of tokens per step."""
    results = llm.generate(
        [PROMPT] * TEXTS,
        max_new_tokens=NEW,
        temperature=temperature,
        seed=0,
        batch_size=50,
        drafter=replace(DRAFTER, state=lookahead.AdaptiveState(DRAFTER)) if warm else None,
    )
    texts = [result.tokens for result in results]
    assert {len(text) for text in texts} == {NEW}
    return texts, NEW * TEXTS / sum(1 + result.stats.steps for result in results)


@pytest.mark.parametrize("temperature", [0.7, 1.0])
@pytest.mark.parametrize("warm", [False, True], ids=["cold", "warm"])
def test_sampled_tokens_have_the_models_probabilities(warm, temperature, model, llm):
    texts, emitted = sampled(llm, temperature, warm)
    assert emitted > 2, "hardly a draft was accepted, so nothing was tested"
    assert min(p_values(texts, model, temperature)) > LEVEL
    assert min(p_values(texts, model, 1.7 - temperature)) < LEVEL  # not those of the other temperature


@pytest.mark.parametrize("temperature", [0.7, 1.0])
def test_rows_of_a_batch_of_transformers_too(temperature, model):
    """One generator draws for all rows, and the rows reach a position in different steps."""
    ids = torch.tensor([PROMPT] * 25)
    texts, stats = [], []
    for seed in range(TEXTS // 25):
        torch.manual_seed(seed)
        out = model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            custom_generate=lookahead.generate,
            do_sample=True,
            max_new_tokens=NEW,
            temperature=temperature,
            drafter=DRAFTER,
            stats=stats,
        )
        texts += out[:, len(PROMPT) :].tolist()
    assert sum(s.accepted for s in stats) > TEXTS * NEW / 3
    assert min(p_values(texts, model, temperature)) > LEVEL


@pytest.fixture
def drafted(monkeypatch):
    """Record the children of each node where a token is chosen, in order; ``preference`` biases the choice.

    Drafters with access to the noise mostly draft the token that is drawn, so here they have none.
    """
    start = Adaptive.start
    monkeypatch.setattr(Adaptive, "start", lambda self, sequence: start(self, replace(sequence, noise=None)))
    loop = importlib.import_module("lookahead.core.loop")
    honest, chance = loop.verify, random.Random(0)
    record = SimpleNamespace(children=[], preference=0.0)

    def verify(tree, choose, finished=None):
        def chosen(node):
            token = choose(node)
            children = [tree.tokens[n] for n in range(1, len(tree)) if tree.parents[n] == node]
            record.children.append(children)
            return children[0] if children and chance.random() < record.preference else token

        return honest(tree, chosen, finished)

    monkeypatch.setattr(loop, "verify", verify)
    return record


@pytest.mark.parametrize(
    ("warm", "temperature", "preference"),
    [(False, 0.7, 0.0), (True, 1.0, 0.0), (False, 1.0, 0.05), (True, 1.0, 0.05)],
    ids=["cold", "warm", "cold, prefers drafted tokens", "warm, prefers drafted tokens"],
)
def test_a_draft_changes_no_probability(warm, temperature, preference, model, llm, drafted):
    """Three cells of tokens: drafted first, drafted otherwise, not drafted. A bias of 1 in 20 is found."""
    drafted.preference = preference
    drafter = replace(DRAFTER, state=lookahead.AdaptiveState(DRAFTER)) if warm else None
    texts, cells = [], []
    for seed in range(TEXTS):
        drafted.children.clear()
        text = llm.generate(
            PROMPT, max_new_tokens=NEW, temperature=temperature, seed=seed, drafter=drafter
        ).tokens
        texts.append(text)
        for children in drafted.children[SKIPPED - 1 : NEW - 1]:  # the prefill chooses without a tree
            first = children[0] if children else None
            cells.append([0 if t == first else 1 if t in children else 2 for t in range(VOCABULARY)])
    cell = torch.tensor(cells)
    drawn, p = (
        torch.zeros(len(cell), 3, dtype=torch.float64).scatter_add(1, cell, values)
        for values in draws(texts, model, temperature)
    )
    assert float(drawn[:, 0].mean()) > 0.1, "hardly a draft was drawn, so nothing was tested"
    if preference:
        assert chi_square(drawn, p) < LEVEL
    else:
        assert chi_square(drawn, p) > LEVEL
