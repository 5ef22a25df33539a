"""The settings of OpenVINO GenAI."""

import pytest

from benchmarks import openvino
from benchmarks.openvino import OpenVino
from benchmarks.peers import make_methods
from lookahead.bench import ModelUnderTest, RunOptions, split_methods
from lookahead.core import SettingsError
from lookahead.testing import FakeTarget


@pytest.fixture
def file(tmp_path, monkeypatch):
    monkeypatch.setattr(openvino, "version", lambda package: "1")
    path = tmp_path / "x.gguf"
    path.touch()
    return path


def test_settings_are_in_the_name_and_in_the_label(file):
    model = ModelUnderTest("fake", FakeTarget(32), gguf=str(file))
    (peer,) = make_methods(f"openvino-lookup:{file}:5,2", model)
    assert isinstance(peer, OpenVino)
    assert (peer.tokens, peer.ngram, peer.label) == (5, 2, "openvino-lookup:x.gguf:5,2")
    (peer,) = make_methods("openvino-lookup", model)
    assert (peer.tokens, peer.ngram, peer.label) == (10, 3, "openvino-lookup:x.gguf")


@pytest.mark.parametrize(
    ("name", "found"),
    [
        ("openvino-greedy:{}", (10, 3, "")),
        ("openvino-greedy:{}:f32", (10, 3, "f32")),
        ("openvino-lookup:{}:bf16", (10, 3, "bf16")),
        ("openvino-lookup:{}:5,2:f32", (5, 2, "f32")),
    ],
)
def test_the_precision_is_in_the_name_and_in_the_label(file, name, found):
    (peer,) = make_methods(name.format(file), ModelUnderTest("fake", FakeTarget(32), gguf=str(file)))
    assert isinstance(peer, OpenVino)
    assert (peer.tokens, peer.ngram, peer.precision) == found
    assert peer.label == name.format("x.gguf")
    assert split_methods([f"{name} jacobi"]) == [name, "jacobi"]


@pytest.mark.parametrize(
    "name",
    [
        "openvino-lookup:{}:5",
        "openvino-lookup:{}:0,3",
        "openvino-lookup:{}:a,b",
        "openvino-lookup:{}:5:f32",
        "openvino-lookup:{}:5,3f32",
        "openvino-lookup:{}::f32",
        "openvino-greedy:{}:5,3",
        "openvino-greedy:{}:f8",
    ],
)
def test_other_settings_are_refused(file, name):
    model = ModelUnderTest("fake", FakeTarget(32), gguf=str(file))
    with pytest.raises(
        SettingsError, match=r"takes FILE, FILE:f32, and openvino-lookup also FILE:TOKENS,NGRAM"
    ):
        make_methods(name.format(file), model)


def test_what_cannot_be_measured_is_refused_with_what_to_do(file):
    model = ModelUnderTest("fake", FakeTarget(32), gguf=str(file))
    with pytest.raises(
        SettingsError,
        match=r"needs a GGUF file or a folder with openvino_model\.xml, got none\.gguf; give it as",
    ):
        make_methods("openvino-greedy:none.gguf", model)
    (file.parent / "x.INT4.openvino").mkdir()
    with pytest.raises(SettingsError, match=r"a folder with openvino_model\.xml, got .*x\.INT4\.openvino"):
        make_methods(f"openvino-greedy:{file.parent}/x.INT4.openvino", model)
    (file.parent / "x.INT4.openvino" / "openvino_model.xml").touch()
    (peer,) = make_methods(f"openvino-lookup:{file.parent}/x.INT4.openvino:3,3", model)
    assert peer.label == "openvino-lookup:x.INT4.openvino:3,3"
    (peer,) = make_methods("openvino-greedy", model)
    with pytest.raises(SettingsError, match=r"openvino-greedy:x\.gguf is greedy, got temperature 0\.7"):
        peer.decode(model, [1], RunOptions(temperature=0.7))
