"""GGUF files on the hub by name, against a local server that answers as the hub does."""

import hashlib
import json
import os
import subprocess
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import unquote, urlsplit

import pytest

from gguf_files import write_llama
from lookahead.core import SettingsError
from lookahead.gguf import hub

COMMIT = "c" * 40
pytestmark = pytest.mark.light


class Hub(ThreadingHTTPServer):
    """Serves repositories: name -> file name -> bytes."""

    def __init__(self, repositories):
        super().__init__(("127.0.0.1", 0), Answer)
        self.repositories = repositories
        self.downloads = []
        self.url = f"http://127.0.0.1:{self.server_port}"
        threading.Thread(target=self.serve_forever, daemon=True).start()


class Answer(BaseHTTPRequestHandler):
    def log_message(self, *_):
        pass

    def reply(self, status, body=b"", **headers):
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name.replace("_", "-"), value)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(body)

    def do_HEAD(self):
        self.do_GET()

    def do_GET(self):
        parts = unquote(urlsplit(self.path).path).strip("/").split("/")
        name = "/".join(parts[2:4] if parts[0] == "api" else parts[:2])
        files = self.server.repositories.get(name)
        if name == "owner/gated":
            return self.reply(403, X_Error_Code="GatedRepo", X_Error_Message="asks for consent")
        if files is None:
            return self.reply(404, X_Error_Code="RepoNotFound")
        revision = (
            parts[5] if parts[0] == "api" and len(parts) > 5 else parts[3] if parts[0] != "api" else "main"
        )
        if revision not in ("main", COMMIT):
            return self.reply(404, X_Error_Code="RevisionNotFound")
        if parts[0] == "api":
            if parts[4:5] == ["tree"]:
                tree = [
                    {"type": "file", "path": p, "size": len(b), "oid": "0" * 40} for p, b in files.items()
                ]
                return self.reply(200, json.dumps(tree).encode(), Content_Type="application/json")
            about = {"id": name, "sha": COMMIT, "siblings": [{"rfilename": path} for path in files]}
            return self.reply(200, json.dumps(about).encode(), Content_Type="application/json")
        body = files.get("/".join(parts[4:]))
        if body is None:
            return self.reply(404, X_Error_Code="EntryNotFound")
        if self.command == "GET":
            self.server.downloads.append(parts[-1])
        etag = f'"{hashlib.sha256(body).hexdigest()}"'
        return self.reply(200, body, ETag=etag, X_Repo_Commit=COMMIT, Accept_Ranges="bytes")


@pytest.fixture(scope="module")
def stand_in(tmp_path_factory):
    folder = tmp_path_factory.mktemp("gguf")
    bodies = {}
    for kind in ("Q8_0", "Q4_0"):
        write_llama(folder / f"{kind}.gguf", kind)
        bodies[kind] = (folder / f"{kind}.gguf").read_bytes()
    server = Hub(
        {
            "owner/small-GGUF": {
                "README.md": b"x",
                "mmproj-small.gguf": b"x",
                "small-q8_0.gguf": bodies["Q8_0"],
                "small-q4_0.gguf": bodies["Q4_0"],
            },
            "owner/split": {"a-Q4_K_M-00001-of-00002.gguf": b"x", "a-Q4_K_M-00002-of-00002.gguf": b"x"},
            "owner/none": {"README.md": b"x"},
        }
    )
    yield server
    server.shutdown()
    server.server_close()


@pytest.fixture(scope="module")
def home(tmp_path_factory):
    return tmp_path_factory.mktemp("hub-cache")


@pytest.fixture
def run(stand_in, home):
    """Runs the command line with the stand-in as its hub."""

    def run(*words, url=stand_in.url, **environment):
        own = {"HF_ENDPOINT": url, "HF_HOME": str(home), "HF_HUB_OFFLINE": "0", "NO_PROXY": "*"}
        command = [sys.executable, "-m", "lookahead", *map(str, words)]
        return subprocess.run(
            command, env=os.environ | own | environment, capture_output=True, text=True, timeout=120
        )

    return run


GENERATE = ("--prompt", "a b", "--max-new-tokens", 4, "--json")


def test_a_model_by_name_is_downloaded_once_listed_and_removed(run, stand_in):
    first = run("generate", "hf.co/owner/small-GGUF:Q8_0", *GENERATE)
    assert first.returncode == 0, first.stderr
    assert stand_in.downloads == ["small-q8_0.gguf"]
    again = run("generate", "owner/small-GGUF:q8_0", *GENERATE)
    assert json.loads(again.stdout)["text"] == json.loads(first.stdout)["text"]
    assert stand_in.downloads == ["small-q8_0.gguf"]  # from the cache

    # Without a quantization, the preferred one of what is there; without the hub, what is in the cache.
    assert run("generate", "owner/small-GGUF", *GENERATE).returncode == 0
    assert stand_in.downloads == ["small-q8_0.gguf", "small-q4_0.gguf"]
    offline = {"url": "http://127.0.0.1:9"}
    assert run("generate", "owner/small-GGUF:Q8_0", *GENERATE, **offline).returncode == 0
    missing = run("generate", "owner/other:Q8_0", *GENERATE, **offline)
    assert missing.returncode == 2
    assert "it is not in the cache, and the hub cannot be reached" in missing.stderr
    assert len(missing.stderr.splitlines()) == 1

    # What is there, and removing it.
    (listed,) = json.loads(run("models", "--json").stdout)["models"]
    assert listed["model"] == "owner/small-GGUF"
    assert len(listed["files"]) == 2
    assert "small-q4_0.gguf" in run("models").stdout
    assert "got 'owner/x'; there: owner/small-GGUF" in " ".join(
        run("models", "--remove", "owner/x").stderr.split()
    )
    removed = json.loads(run("models", "--remove", "owner/small-GGUF", "--json").stdout)
    assert removed["models"] == []
    assert removed["freed"] > 0


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (
            ("owner/small-GGUF:Q6_K",),
            "no file of quantization 'Q6_K'; its files: small-q4_0.gguf, small-q8_0.gguf",
        ),
        (("owner/missing:Q4_0",), "the hub has no such repository, or it is private"),
        (("owner/gated:Q4_0",), "give it on its page, and run: hf auth login"),
        (("owner/split:Q4_K_M",), "merge them with llama-gguf-split"),
        (("hf.co/owner/none",), "must have a GGUF file of a language model, and owner/none has none"),
        (("owner/small-GGUF:Q8_0", "--revision", "v9"), "the hub has no such revision"),
        (("Write a poem",), "got 'Write a poem'; a prompt is given with --prompt"),
    ],
    ids=lambda value: value[0] if isinstance(value, tuple) else "",
)
def test_names_that_cannot_be_loaded_are_one_line(run, words, said):
    result = run("generate", *words, *GENERATE)
    assert result.returncode == 2
    assert said in " ".join(result.stderr.split())
    assert len(result.stderr.splitlines()) == 1


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ("owner/name", ("owner/name", "", False)),
        ("owner/name:Q4_K_M", ("owner/name", "Q4_K_M", True)),
        ("hf.co/owner/name", ("owner/name", "", True)),
        ("https://huggingface.co/owner/name/", ("owner/name", "", True)),
        ("a/b/c", None),
        ("../owner/name", None),
        ("./name", None),
        ("name", None),
    ],
)
def test_names(text, name):
    assert hub.parse(text) == name


def test_the_choice_among_files():
    files = ["a.Q4_K_M.gguf", "a.Q4_K_S.gguf", "a.Q8_0.gguf", "mmproj-a.Q8_0.gguf"]
    assert hub.choose("o/a", files, "") == "a.Q4_K_M.gguf"
    assert hub.choose("o/a", files, "q8_0") == "a.Q8_0.gguf"
    assert hub.choose("o/a", ["only.gguf"], "") == "only.gguf"
    with pytest.raises(SettingsError, match="must mean one file"):
        hub.choose("o/a", ["a.Q8_0.gguf", "b.Q8_0.gguf"], "Q8_0")
