"""Many clients at once, some of them rude: every completed text is plain decoding's, no status 500, flat memory.

Seconds here; ``python -m pytest -m soak tests/test_server_stress.py`` takes ten minutes.
"""

import asyncio
import json
import os
import random
from pathlib import Path
from time import monotonic

import httpx
import pytest

import lookahead
from serving import serving
from toy import save

PROMPTS = ["def add(a, b):", "the quick brown fox", "für 東京", "a" * 200, "x"]
MALFORMED = [
    b"",
    b"{",
    b'{"prompt": 5}',
    b'{"prompt": "x", "n": -1}',
    b"\x00" * 100,
    b'{"prompt":"' + b"y" * 200_000 + b'"}',
]


@pytest.fixture(scope="module")
def llm(tmp_path_factory):
    return lookahead.load(save(tmp_path_factory.mktemp("toy"), max_position_embeddings=512), dtype="float32")


def memory():
    """Bytes of this process."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


class Crowd:
    """Clients that ask, cancel, send nonsense and read slowly, until an end.

    Attributes:
        texts: (prompt, seed, temperature, tokens) -> text.
        statuses: how often each was seen. cancelled: streams that were left.
    """

    def __init__(self, url, seconds):
        self.url, self.end = url, monotonic() + seconds
        self.texts, self.statuses, self.cancelled, self.wrong = {}, {}, 0, []

    async def client(self, number):
        rng = random.Random(number)
        async with httpx.AsyncClient(base_url=self.url, timeout=120) as http:
            while monotonic() < self.end:
                try:
                    await self.one(http, rng)
                except httpx.HTTPError as error:
                    self.wrong.append(repr(error))

    async def one(self, http, rng):
        kind = rng.random()
        if kind < 0.15:
            reply = await http.post(
                "/v1/completions", content=rng.choice(MALFORMED), headers={"Content-Type": "application/json"}
            )
            self.count(reply.status_code)
            return
        key = (rng.choice(PROMPTS), rng.randrange(40), rng.choice([0, 1]), rng.choice([3, 20, 60]))
        prompt, seed, temperature, tokens = key
        body = {
            "prompt": prompt,
            "seed": seed,
            "temperature": temperature,
            "max_tokens": tokens,
            "stream": kind < 0.7,
        }
        body["lookahead"] = {
            "method": rng.choice(["adaptive", "lookahead", "prompt-lookup", "autoregressive"])
        }
        if not body["stream"]:
            reply = await http.post("/v1/completions", json=body)
            self.count(reply.status_code)
            if reply.status_code == 200:
                self.keep(key, reply.json()["choices"][0]["text"])
            return
        leave, slow, text = rng.random() < 0.3, rng.random() < 0.1, ""
        async with http.stream("POST", "/v1/completions", json=body) as reply:
            self.count(reply.status_code)
            if reply.status_code != 200:
                return
            async for line in reply.aiter_lines():
                if leave and rng.random() < 0.3:
                    self.cancelled += 1
                    return
                if slow:
                    await asyncio.sleep(0.05)
                if line == "data: [DONE]":
                    self.keep(key, text)
                elif line:
                    event = json.loads(line[6:])
                    assert "error" not in event, event
                    text += event["choices"][0]["text"]

    def count(self, status):
        self.statuses[status] = self.statuses.get(status, 0) + 1

    def keep(self, key, text):
        if self.texts.setdefault(key, text) != text:
            self.wrong.append(f"two texts for {key}")

    def run(self, clients):
        async def all_of_them():
            await asyncio.gather(*(self.client(number) for number in range(clients)))

        asyncio.run(all_of_them())
        return self


def stress(llm, seconds, clients):
    with serving(llm, max_concurrent=16, max_queue=24, max_body_bytes=100_000) as served:
        Crowd(served.url, 2).run(clients)
        before = memory()
        crowd = Crowd(served.url, seconds).run(clients)
        served.wait(lambda: served.server.loop.load_state == (0, 0))
        after = memory()
    assert crowd.wrong == []
    assert set(crowd.statuses) <= {200, 400, 413, 429}, crowd.statuses
    assert min(crowd.statuses.get(status, 0) for status in (200, 400, 413)) > 0
    assert crowd.cancelled > 0
    assert after < before * 1.1 + (64 << 20)
    for (prompt, seed, temperature, tokens), text in crowd.texts.items():
        options = {"temperature": 1.0, "seed": seed} if temperature else {}
        assert llm.generate(prompt, max_new_tokens=tokens, method="autoregressive", **options).text == text
    return crowd


def test_stress(llm):
    crowd = stress(llm, 4, 64)
    assert len(crowd.texts) > 5


@pytest.mark.soak
@pytest.mark.timeout(1800)
def test_stress_for_ten_minutes(llm):
    crowd = stress(llm, 600, 64)
    print(
        f"\n{len(crowd.texts)} texts equal to plain decoding; {crowd.statuses}; {crowd.cancelled} streams left"
    )


def test_no_request_of_the_served_schema_ends_in_500(llm):
    """Schemathesis makes requests, right and wrong, from the OpenAPI document."""
    import schemathesis
    from hypothesis import HealthCheck, Phase, given, settings
    from hypothesis import strategies as st
    from schemathesis.generation import GenerationMode

    with serving(llm, max_model_len=64, max_choices=4, max_concurrent=32) as served:
        schema = schemathesis.openapi.from_url(f"{served.url}/openapi.json", wait_for_schema=10)
        schema.config.generation.update(modes=list(GenerationMode))
        statuses = set()
        for operation in schema.get_all_operations():
            cases = st.one_of(*(operation.ok().as_strategy(generation_mode=mode) for mode in GenerationMode))

            @settings(
                max_examples=12, deadline=None, database=None, derandomize=True,
                phases=[Phase.generate], suppress_health_check=list(HealthCheck),
            )  # fmt: skip
            @given(case=cases)
            def check(case):
                reply = case.call(timeout=60)
                statuses.add(reply.status_code)
                assert reply.status_code < 500, (case.as_curl_command(), reply.text)
                if reply.status_code >= 400:
                    assert set(reply.json()["error"]) == {"message", "type", "param", "code"}

            check()
        assert statuses >= {200, 400}
