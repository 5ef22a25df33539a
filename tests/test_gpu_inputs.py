"""GPU problems before and during model loading: each gives a one-line message."""

import ast
import re
import tomllib
import warnings
from pathlib import Path

import pytest
import torch

import lookahead
from families import tiny_model
from lookahead.core import OutOfMemory, SettingsError
from lookahead.hf import device as devices
from lookahead.hf.device import find_device
from lookahead.hf.load import Checkpoint, check_causal
from lookahead.options import LoadOptions

ROOT = Path(__file__).parents[1]
OLD_DRIVER = (
    "CUDA initialization: The NVIDIA driver on your system is too old (found version 11040). Please update your GPU "
    "driver by downloading and installing a new version from the URL: http://www.nvidia.com/Download/index.aspx "
    "(Triggered internally at /pytorch/c10/cuda/CUDAFunctions.cpp:119.)"
)


@pytest.fixture
def build(monkeypatch):
    """A fake CUDA build of torch; ``build(count, error, warning)`` sets its GPUs and its messages."""

    def make(count=0, error="", warning=""):
        def available():
            if warning:
                warnings.warn(warning, UserWarning, stacklevel=2)
            return count > 0

        honest = torch.zeros

        def zeros(*shape, device=None, **named):
            if device is not None and torch.device(device).type == "cuda":
                if error:
                    raise torch.AcceleratorError(error)
                device = "cpu"
            return honest(*shape, device=device, **named)

        monkeypatch.setattr(devices, "_torch_has_gpu_code", lambda: True)
        monkeypatch.setattr(torch.cuda, "is_available", available)
        monkeypatch.setattr(torch.cuda, "device_count", lambda: count)
        monkeypatch.setattr(torch, "zeros", zeros)

    return make


def refused(device):
    with pytest.raises(SettingsError) as error:
        find_device(device)
    assert "\n" not in str(error.value)
    return str(error.value)


def test_a_driver_that_is_too_old_leaves_the_cpu_and_says_so(build):
    build(warning=OLD_DRIVER)
    with pytest.warns(RuntimeWarning) as said:
        assert find_device(None) == "cpu"
    (line,) = [str(one.message) for one in said]
    assert line.startswith(
        "the GPU cannot be used, so the model runs on the CPU (CUDA initialization: The NVIDIA dri"
    )
    assert line.endswith("is too old (found version 11040))")


@pytest.mark.parametrize(
    "error",
    [
        "CUDA error: no kernel image is available for execution on the device",
        "CUDA error: all CUDA-capable devices are busy or unavailable",
        "CUDA error: out of memory",
    ],
)
def test_a_gpu_that_fails_leaves_the_cpu_unless_it_was_asked_for(build, monkeypatch, error):
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    build(1, error=f"{error}\nCUDA kernel errors might be reported later")
    with pytest.warns(RuntimeWarning) as said:
        assert find_device(None) == "cpu"
    (line,) = [str(one.message) for one in said]
    assert line == f"the GPU cannot be used, so the model runs on the CPU ({error})"
    assert f"(cpu, cuda), got 'cuda' ({error})" in refused("cuda")


def test_a_gpu_that_was_asked_for_and_cannot_be_used_is_an_error(build, monkeypatch):
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    build(
        error="The NVIDIA driver on your system is too old (found version 11040).\nPlease", warning=OLD_DRIVER
    )
    assert (
        "(cpu), got 'cuda' (The NVIDIA driver on your system is too old (found version 11040).)"
        in refused("cuda")
    )


def test_hidden_devices_are_named(build, monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    build(error="No CUDA GPUs are available")
    assert find_device(None) == "cpu"  # silently, because the variable is meant for it
    assert "got 'cuda' (No CUDA GPUs are available; CUDA_VISIBLE_DEVICES is '')" in refused("cuda")


def test_a_device_number_that_does_not_exist(build, monkeypatch):
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    build(
        2,
        error="CUDA error: invalid device ordinal\nGPU device may be out of range, do you have enough GPUs?",
    )
    assert "(cpu, cuda:0 to cuda:1), got 'cuda:7' (CUDA error: invalid device ordinal)" in refused("cuda:7")


def test_weights_that_do_not_fit(monkeypatch):
    def to(self, device):
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 MiB")

    monkeypatch.setattr(torch.nn.Module, "to", to)
    with pytest.raises(OutOfMemory, match=r"must fit on cuda:0; use device='cpu', a smaller dtype") as error:
        Checkpoint(str(lookahead.BUNDLED), lookahead.BUNDLED, None, LoadOptions()).read_model(
            "float32", "cuda:0"
        )
    assert "\n" not in str(error.value)


def test_float16_that_overflows_is_refused_and_a_single_bad_token_is_not():
    model = tiny_model("llama").to(torch.float16)
    check_causal(model, "it")
    model.model.embed_tokens.weight.data[5] = torch.nan
    check_causal(model, "it")
    model.model.norm.weight.data.fill_(torch.inf)
    with pytest.raises(SettingsError, match=r"those of it are NaN in float16.*load it with dtype='bfloat16'"):
        check_causal(model, "it")


def test_load_and_custom_generate_say_once_that_a_model_runs_slower_than_it_can(toy_plain, monkeypatch):
    why = "compiled passes support float32 and bfloat16, the model is torch.float16"
    with pytest.warns(UserWarning, match=f"toy runs on the slower transformers path: {why}$") as said:
        llm = lookahead.load(toy_plain, dtype="float16", device="cpu")
    assert len(said) == 1
    prompt = torch.tensor([[5, 6, 7]])
    llm.model.module.generate(
        prompt, max_new_tokens=2, custom_generate=lookahead.generate
    )  # a warning is an error here
    lookahead.load(toy_plain, dtype="bfloat16", device="cpu")


#: Names in torch that are newer than 2.5, with the version that added them.
NEWER = {"AcceleratorError": (2, 8), "accelerator": (2, 6)}


def test_no_name_of_torch_is_newer_than_the_oldest_version_allowed():
    text = (ROOT / "pyproject.toml").read_text()
    needs = next(
        need
        for need in tomllib.loads(text)["project"]["optional-dependencies"]["transformers"]
        if need.startswith("torch")
    )
    oldest = tuple(int(part) for part in re.findall(r"\d+", needs))
    used = {
        node.attr
        for file in (ROOT / "src").rglob("*.py")
        for node in ast.walk(ast.parse(file.read_text()))
        if isinstance(node, ast.Attribute) and ast.unparse(node.value) == "torch"
    }
    assert "AcceleratorError" in used  # the test reads the right files
    assert not {name: NEWER[name] for name in used & NEWER.keys() if NEWER[name] > oldest}
