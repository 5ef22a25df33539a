"""Hidden states (inputs of the output matrix): on every path that has them, and None unless requested."""

import numpy as np
import pytest
import torch

from families import tiny_model
from lookahead.core import TokenTree
from lookahead.hf import attention
from lookahead.hf.attention_hook import TreeAttention
from lookahead.hf.cuda_graphs import CudaGraphTarget
from lookahead.hf.facts import ModelFacts
from lookahead.hf.fingerprint import fingerprint
from lookahead.hf.model import HFModel
from lookahead.hf.paths import make_target, probe
from lookahead.hf.quantize import quantize_model
from lookahead.hf.target import head_inputs
from lookahead.testing import FakeTarget

PROMPTS = [[5, 9, 14, 5, 9], [7, 8, 9]]


def trees(hidden=True):
    """A tree for each prompt; one row of the first has no logits."""
    first, second = TokenTree(3), TokenTree(11)
    first.add_candidate([4, 5, 6])
    first.add_candidate([4, 9])
    first.add(12, 0)
    second.add_candidate([2])
    first.needs_hidden = hidden
    return [first, second]


def evaluated(target, hidden=True):
    """Trees and their scores from one pass."""
    target.prefill(list(enumerate(PROMPTS)))
    both = trees(hidden)
    return list(zip(both, target.forward(list(enumerate(both))), strict=True))


def reference(model, prompt, tree, node):
    """The model's own input to its output matrix after this path."""
    ids = torch.tensor([prompt + tree.path_tokens(node)], device=model.device)
    with torch.no_grad():
        state = model(input_ids=ids, output_hidden_states=True).hidden_states[-1][0, -1]
    return state.float().cpu().numpy()


def make(path, dtype="float32", family="llama"):
    model = tiny_model(family).to(getattr(torch, dtype))
    if path == "cuda-graph":
        model = model.to("cuda") if torch.cuda.is_available() else model
        tree_attention = TreeAttention(model, attention.get("auto", model.device))
        return model, CudaGraphTarget(model, probe(model).facts, tree_attention, 64)
    return model, make_target(model, path=path)


@pytest.mark.parametrize(
    ("path", "dtype", "limit"),
    [("cpu", "float32", 1e-4), ("cpu", "bfloat16", 0.1), ("transformers", "float32", 1e-5)],
)
def test_hidden_states_are_those_of_the_model(path, dtype, limit):
    model, target = make(path, dtype)
    assert target.path == path
    for prompt, (tree, scores) in zip(PROMPTS, evaluated(target), strict=True):
        for node in tree.needs_logits_nodes():
            state = scores.hidden(node)
            assert state.dtype == np.float32
            expected = reference(model, prompt, tree, node)
            assert np.abs(state - expected).max() < limit * np.abs(expected).max()


def test_a_model_whose_forward_cannot_leave_out_rows():
    model, target = make("transformers")
    target.facts.accepts_logits_to_keep = False
    for prompt, (tree, scores) in zip(PROMPTS, evaluated(target), strict=True):
        for node in tree.needs_logits_nodes():
            expected = reference(model, prompt, tree, node)
            assert np.abs(scores.hidden(node) - expected).max() < 1e-4


@pytest.mark.parametrize("sequences", [1, 2], ids=["captured", "several"])
def test_captured_passes_give_hidden_states(sequences):
    model, target = make("cuda-graph")
    for hidden in (True, False, True):
        target.prefill(list(enumerate(PROMPTS[:sequences])))
        both = trees(hidden)[:sequences]
        for prompt, tree, scores in zip(PROMPTS, both, target.forward(list(enumerate(both))), strict=False):
            nodes = tree.needs_logits_nodes()
            assert hidden or [scores.hidden(node) for node in nodes] == [None] * len(nodes)
            for node in nodes if hidden else ():
                expected = reference(model, prompt, tree, node)
                assert np.abs(scores.hidden(node) - expected).max() < 1e-4
        for slot in range(sequences):
            target.release(slot)


def test_packed_weights_give_hidden_states():
    model = tiny_model("llama")
    facts = probe(model).facts
    assert isinstance(facts, ModelFacts)
    packed = quantize_model(HFModel(model), "q8_0")
    for prompt, (tree, scores) in zip(PROMPTS, evaluated(packed.make_target()), strict=True):
        for node in tree.needs_logits_nodes():
            expected = reference(model, prompt, tree, node)
            error = scores.hidden(node) - expected
            assert np.sqrt(np.mean(error**2)) < 0.05 * np.sqrt(np.mean(expected**2))


@pytest.mark.parametrize("path", ["cpu", "transformers", "plain"])
def test_without_a_question_there_are_none(path):
    _, target = make(path)
    slots = [(slot, TokenTree(3)) for slot in range(2)]
    for scores in (*target.prefill(list(enumerate(PROMPTS))), *target.forward(slots)):
        assert scores.hidden(0) is None
    if path == "plain":  # nor on request
        tree = TokenTree(3)
        tree.needs_hidden = True
        assert target.forward([(0, tree)])[0].hidden(0) is None


def test_a_target_without_a_model_has_none():
    assert [scores.hidden(0) for _, scores in evaluated(FakeTarget(vocabulary=96))] == [None, None]


def test_hidden_states_outlive_the_next_step():
    _, target = make("cpu")
    (_, scores), _ = evaluated(target)
    before = scores.hidden(2)
    target.commit([(0, [0, 1]), (1, [0])])
    target.forward([(0, TokenTree(8)), (1, TokenTree(8))])
    assert (scores.hidden(2) == before).all()


def test_a_part_of_a_tree_asks_too():
    tree = trees()[0]
    assert tree.subtree([0, 1]).needs_hidden
    assert not trees(False)[0].subtree([0, 1]).needs_hidden


def test_collecting_in_one_thread_leaves_the_model_as_it_is():
    model = tiny_model("llama")
    before = fingerprint(model)
    with head_inputs(model, True) as states:
        assert fingerprint(model) == before
        model(input_ids=torch.tensor([[3, 4]]))
    model(input_ids=torch.tensor([[3, 4]]))
    assert [tuple(state.shape) for state in states] == [(1, 2, 64)]
    assert not model.get_output_embeddings()._forward_pre_hooks
