"""The public API: the package exports exactly these names, and each of them is documented."""

import inspect
import re
import tomllib
from pathlib import Path
from typing import get_overloads

import pytest

import lookahead

ROOT = Path(__file__).parent.parent


def test_exported_names_are_exactly_these():
    assert lookahead.__all__ == [
        "BUNDLED",
        "LLM",
        "Adaptive",
        "AdaptiveState",
        "Jacobi",
        "Lookahead",
        "LookaheadError",
        "NGramPool",
        "NumericalError",
        "Options",
        "OutOfMemory",
        "Plain",
        "PromptLookup",
        "Result",
        "SettingsError",
        "Stats",
        "__version__",
        "as_drafter",
        "as_torch",
        "default_model",
        "generate",
        "load",
        "refresh",
    ]
    assert dir(lookahead) == sorted(lookahead.__all__)
    with pytest.raises(AttributeError, match="no attribute 'Generator'"):
        _ = lookahead.Generator


@pytest.mark.parametrize("name", [name for name in lookahead.__all__ if name[0] != "_"])
def test_public_objects_are_explained(name):
    found = getattr(lookahead, name)
    if not (inspect.isclass(found) or inspect.isfunction(found)):
        return
    assert inspect.getdoc(found), name
    members = (
        {key: value for key, value in vars(found).items() if key[0] != "_"} if inspect.isclass(found) else {}
    )
    for key, value in members.items():
        if isinstance(value, property) or inspect.isroutine(getattr(found, key)):
            assert inspect.getdoc(getattr(found, key)), f"{name}.{key}"


@pytest.mark.parametrize(
    "call",
    [lookahead.load, lookahead.LLM.generate, lookahead.LLM.stream, lookahead.LLM.run],
    ids=lambda c: c.__name__,
)
def test_calls_explain_every_argument_and_name_their_errors(call):
    described = inspect.getdoc(call)
    assert "Raises:\n    SettingsError: " in described
    for name in inspect.signature(call).parameters.keys() - {"self"}:
        assert re.search(rf"^ {{4}}(\*\*)?{name}: ", described, re.M), name


def test_generate_has_a_type_for_one_prompt_and_for_a_list():
    overloads = [inspect.signature(call) for call in get_overloads(lookahead.LLM.generate)]
    assert [(s.parameters["prompt"].annotation, s.return_annotation) for s in overloads] == [
        ("OnePrompt", "Result"),
        ("Sequence[OnePrompt]", "list[Result]"),
        ("torch.Tensor", "Result | list[Result]"),
    ]


def test_the_version_is_the_same_everywhere():
    version = lookahead.__version__
    assert tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"] == version
    assert f"\nversion: {version}\n" in (ROOT / "CITATION.cff").read_text()
    assert f"\n## {version}, " in (ROOT / "CHANGELOG.md").read_text()
