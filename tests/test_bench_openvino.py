"""The settings of OpenVINO GenAI's prompt lookup."""

import pytest

from benchmarks import gguf_peer
from benchmarks.openvino import OpenVino
from benchmarks.peers import make_methods
from lookahead.bench import ModelUnderTest
from lookahead.core import SettingsError
from lookahead.testing import FakeTarget


@pytest.fixture
def file(tmp_path, monkeypatch):
    monkeypatch.setattr(gguf_peer, "version", lambda package: "1")
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
    "name",
    ["openvino-lookup:{}:5", "openvino-lookup:{}:0,3", "openvino-lookup:{}:a,b", "openvino-greedy:{}:5,3"],
)
def test_other_settings_are_refused(file, name):
    model = ModelUnderTest("fake", FakeTarget(32), gguf=str(file))
    with pytest.raises(SettingsError, match=r"takes FILE, and openvino-lookup also FILE:TOKENS,NGRAM"):
        make_methods(name.format(file), model)
