"""What each rank decides for itself: its device, and whether logits differ beyond rounding. One process."""

import pytest
import torch

from families import tiny_model
from lookahead.core import SettingsError, TokenTree
from lookahead.equivalence import Equivalence, differ
from lookahead.hf.paths import probe
from lookahead.parallel import local_device, start
from rows import row_of


@pytest.fixture
def four_gpus(monkeypatch):
    """Make torch report four GPUs; this process is local rank 2."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    monkeypatch.setenv("LOCAL_RANK", "2")


def test_a_device_without_index_is_the_ranks_own(four_gpus, monkeypatch):
    for device in (None, "cuda", torch.device("cuda")):
        assert local_device(device) == "cuda:2"
    assert local_device("cuda:1") == "cuda:1"
    assert local_device("cpu") == "cpu"
    monkeypatch.setenv("LOCAL_RANK", "4")
    with pytest.raises(
        SettingsError, match="has 4, too few for local rank 4; start at most 4 processes per node"
    ):
        local_device("cuda")


def test_without_a_gpu_a_rank_is_on_the_cpu(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    assert local_device() == "cpu"
    with pytest.raises(SettingsError, match="has 0, too few for local rank 0"):
        local_device("cuda")


def test_start_makes_the_ranks_own_gpu_the_current_one(four_gpus, monkeypatch):
    """``torch.cuda.set_device`` refuses a device without an index."""
    from lookahead.parallel import connect

    current = []
    monkeypatch.setattr(torch.cuda, "set_device", current.append)
    monkeypatch.setattr(connect, "_device_id", lambda device: [0, 0])
    monkeypatch.setattr(connect.dist, "is_initialized", lambda: True)
    monkeypatch.setattr(connect.dist, "get_rank", lambda: 0)
    monkeypatch.setattr(connect.dist, "get_world_size", lambda: 1)
    monkeypatch.setattr(connect, "_gather", lambda numbers, timeout: [numbers])
    assert start(device="cuda").backend == "gloo"
    assert current == [torch.device("cuda", 2)]


def test_load_puts_the_model_on_the_ranks_own_gpu(four_gpus, monkeypatch):
    from lookahead import loading, parallel
    from lookahead.options import LoadOptions

    monkeypatch.setattr(loading, "find_device", torch.device)  # the original tries the device
    monkeypatch.setattr(parallel, "start", lambda timeout, device: device)
    options = LoadOptions(parallel="lookahead", device="cuda")
    assert loading._start_ranks(options) == (torch.device("cuda", 2),) * 2


@pytest.mark.parametrize("given", [None, "cuda"])
def test_a_rank_whose_own_gpu_cannot_be_used_says_where_it_comes_from(four_gpus, monkeypatch, given):
    from lookahead import loading
    from lookahead.options import LoadOptions

    def zeros(*shape, device):
        raise torch.AcceleratorError("CUDA error: invalid device ordinal")

    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setattr(torch, "zeros", zeros)
    with pytest.raises(
        SettingsError,
        match=r"got 'cuda:2' \(CUDA error: invalid device ordinal\); cuda:2 is this process's own GPU, by its "
        r"LOCAL_RANK: start fewer processes, or give device='cpu'$",
    ):
        loading._start_ranks(LoadOptions(parallel="lookahead", device=given))
    with pytest.raises(SettingsError, match=r"got 'cuda:1' \(CUDA error: invalid device ordinal\)$"):
        loading._start_ranks(LoadOptions(parallel="lookahead", device="cuda:1"))


def root_row(model, prompt, root, others=0, wrong=None):
    """The root's logits from a pass with other rows; ``wrong`` replaces the last token in the cache."""
    from lookahead.hf.paths import make_target

    target = make_target(model, path="transformers")
    target.prefill([(0, [*prompt[:-1], prompt[-1] if wrong is None else wrong])])
    tree = TokenTree(root)
    for token in range(others):
        tree.add(token, token // 3, True)
    (scores,) = target.forward([(0, tree)])
    return row_of(scores, 0).clone()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_on_a_model_other_rows_pass_and_a_wrong_token_in_the_cache_does_not(dtype):
    model = tiny_model("gemma3", initializer_range=0.1).to(dtype)
    prompt = [(7 * i + 3) % 96 for i in range(24)]
    found = probe(model).equivalence
    alone = root_row(model, prompt, 17)
    assert not differ(found, alone, root_row(model, prompt, 17, others=30))
    assert not differ(found, alone, alone + 2)  # a shift changes no probability
    assert "is allowed" in differ(found, alone, root_row(model, prompt, 17, wrong=5))
    assert "inf" in differ(found, alone, alone.index_fill(0, torch.tensor(7), float("nan")))


def test_ranks_are_judged_by_the_model_s_own_rounding():
    """A fixed limit would stop healthy groups if a model rounds more, and miss faults if it rounds less."""
    row, noise = torch.randn(2, 500, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    for own, part, wrong in ((0.02, 0.1, False), (0.02, 0.15, True), (0.05, 0.25, False), (0.0, 0.003, True)):
        found = Equivalence(True, 1.0, 9.0, 3.0, own, "")
        assert bool(differ(found, row, row + part * noise * row.norm() / noise.norm())) == wrong
