"""Two Ray Serve replicas on one machine; takes minutes, so make soak runs it."""

import json

import httpx
import pytest

import lookahead
from serving import save_tiny

pytestmark = [pytest.mark.soak, pytest.mark.filterwarnings("ignore")]


def test_two_replicas_answer_and_stream_the_same_texts(tmp_path, monkeypatch):
    monkeypatch.setenv("RAY_AUTH_MODE", "disabled")  # before ray is imported
    ray = pytest.importorskip("ray")
    from ray import serve

    from lookahead.integrations.ray_serve import build

    folder = save_tiny(tmp_path / "toy", 512)
    expected = lookahead.load(folder).generate("def add", max_new_tokens=20, drafter="off").text
    ray.init(num_cpus=2, include_dashboard=False, object_store_memory=80 << 20, configure_logging=False)
    try:
        serve.start(http_options={"port": 8017})
        given = {
            "model": str(folder),
            "drafter": "prompt-lookup",
            "min_replicas": 2,
            "max_replicas": 2,
            "num_cpus": 0.5,
        }
        serve.run(build(given))
        with httpx.Client(base_url="http://127.0.0.1:8017", timeout=120) as http:
            body = {"prompt": "def add", "max_tokens": 20, "temperature": 0}
            answers = [http.post("/v1/completions", json=body).json() for _ in range(8)]
            assert {answer["choices"][0]["text"] for answer in answers} == {expected}
            with http.stream("POST", "/v1/completions", json=body | {"stream": True}) as reply:
                frames = [line for line in reply.iter_lines() if line]
            assert frames.pop() == "data: [DONE]"
            assert "".join(json.loads(f[6:])["choices"][0]["text"] for f in frames) == expected
            assert http.post("/v1/completions", json={"prompt": "x", "foo": 1}).status_code == 400
    finally:
        serve.shutdown()
        ray.shutdown()
