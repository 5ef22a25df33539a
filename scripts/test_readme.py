"""Runs every code block of README.md, in order, in a fresh environment, as a new user would.

    python scripts/test_readme.py [--torch OPTIONS] [--wheel FILE] [--keep DIR]

The project is copied from git, so uncommitted files are missing. With ``--wheel``, this wheel is installed instead of
the copy. Blocks are handled by language:

- ``bash``: each command is run as it is. ``MODEL`` is replaced by the bundled tiny model. ``lookahead serve`` runs in
  the background until the end. ``make`` and ``git clone`` are skipped, because CI runs make's targets itself.
- ``console``: commands after ``$`` are run, and their output must match what follows; ``...`` matches anything.
- ``python``: all blocks share one interpreter. A comment after a ``print`` is the expected output. A block marked
  ``no-run`` needs the server, which is running by then; a ``text`` block after it is its expected output.
- Others are ignored.

Only the standard library is needed.
"""

from __future__ import annotations

import argparse
import os
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from pathlib import Path

ROOT = Path(__file__).parent.parent
BLOCK = re.compile(r"^```(\w+)([^\n]*)\n(.*?)^```$", re.S | re.M)
#: A program that reads names of files from its input and runs them in one namespace.
INTERPRETER = """
import sys, traceback
namespace = {"__name__": "readme"}
for name in sys.stdin:
    try:
        exec(compile(open(name.strip()).read(), name.strip(), "exec"), namespace)
        outcome = "done"
    except BaseException:
        traceback.print_exc(file=sys.stdout)
        outcome = "failed"
    print("\\n<<" + outcome + ">>", flush=True)
"""
SERVER = "http://127.0.0.1:8000"
READY_SECONDS = 300


class Failed(Exception):
    """A block does not do what the README states."""


class Reader:
    """A user in an empty environment who follows the README.

    Args:
        folder: an empty folder.
        torch: pip options for installing torch; "" lets the README's own command install it.
        wheel: what is installed instead of the project's folder, or None.
    """

    def __init__(self, folder: Path, torch: str, wheel: Path | None) -> None:
        self.wheel = wheel
        # The project, from git.
        self.project = folder / "project"
        self.outside = folder / "outside"
        self.outside.mkdir()
        archive = subprocess.run(
            ["git", "-C", ROOT, "archive", "HEAD"], check=True, capture_output=True
        ).stdout
        self.project.mkdir()
        subprocess.run(["tar", "-x", "-C", self.project], input=archive, check=True)

        # An environment that ignores the caller's.
        subprocess.run([sys.executable, "-m", "venv", folder / "venv"], check=True)
        programs = folder / "venv" / "bin"
        hidden = ("PYTHONPATH", "VIRTUAL_ENV")
        self.environment = {name: value for name, value in os.environ.items() if name not in hidden}
        self.environment |= {"PATH": f"{programs}{os.pathsep}{os.environ['PATH']}", "COLUMNS": "100"}
        (self.project / "prompts.jsonl").write_text('{"id": 1, "prompt": "def add(a, b):"}\n')
        self.server: subprocess.Popen[bytes] | None = None
        self.python: subprocess.Popen[str] | None = None
        if torch:
            self.shell(f"pip install --quiet -c constraints.txt {torch} torch")

    def close(self) -> None:
        """End background processes."""
        for process in (self.server, self.python):
            if process is not None:
                process.terminate()
                process.communicate()

    def shell(self, command: str) -> str:
        """Run one command in the project's folder. Returns its output."""
        done = subprocess.run(
            ["bash", "-c", command],
            cwd=self.project,
            env=self.environment,
            input="hello\n/exit\n",  # for a conversation
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        if done.returncode:
            raise Failed(f"{command}\nended with status {done.returncode}:\n{done.stdout[-3000:]}")
        return done.stdout

    def serve(self, command: str) -> None:
        """Start a server and wait until it is ready."""
        self.server = subprocess.Popen(shlex.split(command), cwd=self.project, env=self.environment)
        end = time.monotonic() + READY_SECONDS
        while time.monotonic() < end:
            if self.server.poll() is not None:
                raise Failed(f"{command} ended with status {self.server.returncode}")
            try:
                with urllib.request.urlopen(f"{SERVER}/v1/models") as answer:
                    if answer.status == 200:
                        return
            except (urllib.error.URLError, OSError):
                time.sleep(1)
        raise Failed(f"{command} is not ready after {READY_SECONDS} s")

    def run_bash(self, block: str) -> None:
        """Run the commands of a block. A line that ends with a backslash continues on the next one."""
        for line in block.replace("\\\n", " ").splitlines():
            command = re.sub(r"\s+#.*$", "", line).strip()
            if not command or command.startswith(("#", "make ", "git clone")):
                continue
            command = re.sub(r"\bMODEL\b", "tiny", command)
            if self.wheel is not None and command.startswith("pip install"):
                command = of_wheel(command, self.wheel)
            print(f"  $ {command}", flush=True)
            if command.startswith("lookahead serve"):
                self.serve(command)
            else:
                self.shell(command)

    def run_console(self, block: str) -> None:
        """Run each command after "$ " and compare its output."""
        for part in re.split(r"^\$ ", block, flags=re.M)[1:]:
            joined = part.replace("\\\n", " ")
            command, _, expected = joined.partition("\n")
            print(f"  $ {command[:100]}", flush=True)
            compare(self.shell(command), expected)

    def run_python(self, block: str, number: int) -> str:
        """Run a block in the interpreter of the earlier ones, outside the project. Returns its output."""
        if self.python is None:
            self.python = subprocess.Popen(
                ["python", "-c", INTERPRETER],
                cwd=self.outside,
                env=self.environment,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
            )
        assert self.python.stdin is not None
        assert self.python.stdout is not None
        path = self.outside / f"block{number}.py"
        path.write_text(block)
        print(f"{path}", file=self.python.stdin, flush=True)
        printed = ""
        for line in self.python.stdout:
            if line in ("<<done>>\n", "<<failed>>\n"):
                if "failed" in line:
                    raise Failed(f"block {number}:\n{printed[-3000:]}")
                return printed
            printed += line
        raise Failed(f"the interpreter ended in block {number}:\n{printed[-3000:]}")


def of_wheel(command: str, wheel: Path) -> str:
    """An installation of the project's folder, "." or ".[EXTRA]", as one of the wheel; other commands unchanged."""
    return re.sub(r" '?\.(\[.*\])?'?$", lambda found: f" '{wheel}{found[1] or ''}'", command)


def compare(printed: str, expected: str) -> None:
    """Raise Failed unless the output is as expected, where "..." matches anything."""
    pattern = r"\s*".join(
        ".*?".join(re.escape(part) for part in word.split("...")) for word in expected.split()
    )
    if re.fullmatch(rf"\s*{pattern}\s*", printed, flags=re.S) is None:
        raise Failed(f"expected\n{expected}\ngot\n{printed[-3000:]}")


def run(reader: Reader, text: str) -> None:
    """Run all blocks of a page."""
    printed = None
    for number, (kind, mark, block) in enumerate(BLOCK.findall(text), 1):
        start = time.monotonic()
        print(f"block {number}, {kind}{mark}", flush=True)
        if kind in ("bash", "sh"):
            reader.run_bash(block)
        elif kind == "console":
            reader.run_console(block)
        elif kind == "python":
            if "no-run" in mark:
                reader.shell("pip install --quiet openai")
            printed = reader.run_python(block, number)
            for said in re.findall(r"^\s*print\(.*\)  # (.*)$", block, re.M):
                compare(printed, f"...{said}...")
        elif kind == "text" and printed is not None:
            compare(printed, block)
        print(f"  {time.monotonic() - start:.0f} s", flush=True)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--torch", default="", help="pip options for installing torch")
    parser.add_argument("--wheel", type=Path, help="install this wheel instead of the project's folder")
    parser.add_argument("--keep", type=Path, help="work in this new folder, and keep it")
    arguments = parser.parse_args()
    folder = arguments.keep or Path(tempfile.mkdtemp(prefix="readme-"))
    folder.mkdir(exist_ok=True)
    wheel = arguments.wheel and arguments.wheel.resolve(strict=True)
    reader = Reader(folder.resolve(), arguments.torch, wheel)
    try:
        run(reader, (ROOT / "README.md").read_text(encoding="utf-8"))
    except Failed as error:
        print(f"error: the README is wrong: {error}", file=sys.stderr)
        return 1
    finally:
        reader.close()
        if arguments.keep is None:
            shutil.rmtree(folder, ignore_errors=True)
    print("every block of the README works as stated")
    return 0


if __name__ == "__main__":
    sys.exit(main())
