"""docs/server.md lists every field, setting, metric, path and status; the files in deploy/ are complete."""

import json
import re
import runpy
import shutil
import subprocess
import time
from contextlib import suppress
from dataclasses import fields
from pathlib import Path
from types import SimpleNamespace

import httpx
import pytest
import yaml

import lookahead
from gguf_files import write_gguf
from lookahead.server.connections import MOST, SENDING
from lookahead.server.grammar import ALLOWANCE, LARGEST
from lookahead.server.metrics import Metrics
from lookahead.server.protocol import DEEPEST, LONGEST_STOP, MOST_STOPS
from lookahead.server.response_api import MOST_CHARACTERS, MOST_KEPT
from lookahead.server.settings import Settings

ROOT = Path(__file__).parent.parent
PAGE = ROOT / "docs" / "server.md"
DEPLOY = ROOT / "deploy"


def test_the_page_lists_every_field_setting_and_metric():
    draw = SimpleNamespace(**runpy.run_path(str(ROOT / "docs" / "draw_server.py")))
    text = PAGE.read_text()
    assert draw.page(text) == text, "run python docs/draw_server.py --write"
    for name, rows in draw.tables().items():
        assert len(rows) > 2, name
        assert all(cell is not None for row in rows for cell in row), name
        assert all(f"| {row[0]} |" in text for row in rows), name


def test_the_page_gives_the_bytes_of_a_token(tmp_path):
    write_gguf(tmp_path / "model.gguf", "llama", "Q8_0")
    compiled = lookahead.load(tmp_path / "model.gguf").model.compiled
    numbers = 2 * len(compiled._layers) * compiled.key_heads * compiled.padded_head
    size = compiled.token_bytes // numbers
    for layers, heads, width in ((30, 3, 64), (24, 2, 64), (28, 2, 128)):
        assert f" {2 * layers * heads * width * size:,} " in PAGE.read_text().replace("\n", " ")


def test_the_page_names_every_path_and_status():
    from lookahead.server.app import create_app

    text = PAGE.read_text()
    for path in create_app(Settings()).openapi()["paths"]:
        assert f"`{path}`" in text, path
    source = "".join(path.read_text() for path in (ROOT / "src/lookahead/server").glob("*.py"))
    for status in set(re.findall(r"\b(?:Refused\([^)]*?|error_response\([^)]*?), (4\d\d|5\d\d)\b", source)):
        assert re.search(rf"^\| (?:\d+, )?{status}", text, re.M), status


def test_the_dashboard_asks_for_metrics_that_there_are():
    board = json.loads((DEPLOY / "grafana" / "lookahead.json").read_text())
    page = Metrics().page().decode()
    asked = {
        name
        for panel in board["panels"]
        for target in panel["targets"]
        for name in re.findall(r"lookahead_\w+", target["expr"])
    }
    assert len(asked) >= 12
    for name in asked:
        assert re.sub(r"_(bucket|total)$", "", name) in page, name


def test_the_files_of_deploy_are_whole():
    compose = yaml.safe_load((DEPLOY / "compose.yaml").read_text())
    for service in compose["services"].values():
        for volume in service.get("volumes", []):
            source = volume.split(":")[0]
            assert source in compose["volumes"] or (DEPLOY / source).is_file(), source
    for name in compose["services"]["lookahead"]["environment"]:
        assert name.removeprefix("LOOKAHEAD_").lower() in {field.name for field in fields(Settings)}
    docker = (DEPLOY / "Dockerfile").read_text()
    for copied in re.findall(r"^COPY (.+) \S+$", docker, re.M):
        assert all((ROOT / name).exists() for name in copied.split()), copied
    assert "LOOKAHEAD_WHEEL=" in docker  # of the build (hatch_build.py)
    for name in re.findall(r"LOOKAHEAD_(?!WHEEL)(\w+)=", docker):
        assert name.lower() in {field.name for field in fields(Settings)}
    # A new volume has the owner of the folder in the image, so it must exist and belong to the user.
    (cache,) = [volume.split(":")[1] for volume in compose["services"]["lookahead"]["volumes"]]
    assert re.search(rf"install -d -o lookahead -g lookahead {cache}$", docker, re.M)
    assert f"XDG_CACHE_HOME={cache}" in docker
    assert "lookahead serve" in (DEPLOY / "lookahead.service").read_text()


@pytest.mark.slow
def test_the_image_answers_without_writing_and_compiles_nothing():
    """Where docker is: built, started as its user with a read-only root and an empty cache, and asked."""
    if shutil.which("docker") is None or subprocess.run(["docker", "info"], capture_output=True).returncode:
        pytest.skip("no docker here")
    subprocess.run(
        ["docker", "build", "-q", "-f", "deploy/Dockerfile", "-t", "lookahead-test", "."],
        cwd=ROOT,
        check=True,
    )
    command = ["docker", "run", "-d", "--read-only", "-p", "127.0.0.1::8000", "lookahead-test"]
    container = subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()
    try:
        port = subprocess.run(
            ["docker", "port", container, "8000"], check=True, capture_output=True, text=True
        )
        url = f"http://{port.stdout.split()[0]}"
        end = time.monotonic() + 60
        while time.monotonic() < end:
            with suppress(httpx.TransportError):
                if httpx.get(f"{url}/health").status_code == 200:
                    break
            time.sleep(0.5)
        reply = httpx.post(
            f"{url}/v1/completions", json={"prompt": "January = 1;", "max_tokens": 4}, timeout=60
        )
        assert reply.status_code == 200
        done = subprocess.run(["docker", "logs", container], capture_output=True, text=True, check=True)
        logged = done.stdout + done.stderr
        assert "compil" not in logged.replace("loading and compiling", "")
        assert logged.count("must be a writable folder") == 1
    finally:
        subprocess.run(["docker", "rm", "-f", container], check=True, capture_output=True)


@pytest.mark.parametrize("name", ["prometheus.yaml", "grafana/datasource.yaml", "grafana/dashboards.yaml"])
def test_yaml_can_be_read(name):
    assert yaml.safe_load((DEPLOY / name).read_text())


def test_every_promise_in_security_md_names_a_test_that_there_is():
    page = (ROOT / "SECURITY.md").read_text()
    rows = re.findall(r"^\| .* \| .* \| `?test_.* \|$", page, re.M)
    assert len(rows) > 10
    sources = "".join(path.read_text() for path in (ROOT / "tests").glob("test_*.py"))
    names = re.findall(r"`(test_\w+)`", page)
    assert len(names) > len(rows) + 10
    for name in names:
        assert f"def {name}(" in sources, name
    assert (MOST_KEPT, MOST_CHARACTERS) == (256, 64 << 20)
    for number in (MOST_STOPS, LONGEST_STOP, LARGEST, ALLOWANCE, DEEPEST, SENDING, MOST):
        assert f"{number:,g}" in page, number
