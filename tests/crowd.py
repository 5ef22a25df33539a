"""Many concurrent clients of a server under test; some send malformed requests or disconnect."""

import asyncio
import json
import random
from time import monotonic

import httpx

PROMPTS = ["def add(a, b):", "the quick brown fox", "für 東京", "a" * 200, "x"]
MALFORMED = [
    b"",
    b"{",
    b'{"prompt": 5}',
    b'{"prompt": "x", "n": -1}',
    b"\x00" * 100,
    b'{"prompt":"' + b"y" * 200_000 + b'"}',
]


class Crowd:
    """Clients that send good and bad requests, cancel and read slowly, until a deadline.

    Attributes:
        texts: (prompt, seed, temperature, tokens) -> completion.
        statuses: the count of each. completed, cancelled: whole completions, streams that clients abandoned.
        ended, cut: streams that the server's exit cut short, with and without an error event.
        lost: connections that broke or could not be opened.
    """

    def __init__(self, url, seconds):
        self.url, self.end = url, monotonic() + seconds
        self.texts, self.statuses, self.wrong, self.lost = {}, {}, [], []
        self.completed = self.cancelled = self.ended = self.cut = 0

    async def client(self, number):
        rng = random.Random(number)
        async with httpx.AsyncClient(base_url=self.url, timeout=120) as http:
            while monotonic() < self.end:
                try:
                    await self.one(http, rng)
                except httpx.HTTPError as error:
                    self.lost.append(repr(error))
                    self.cut += isinstance(error, httpx.RemoteProtocolError) and "incomplete" in str(error)
                    await asyncio.sleep(0.02)

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
        body["lookahead"] = {"drafter": rng.choice(["adaptive", "lookahead", "prompt-lookup", "plain"])}
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
                    if "error" in event:
                        self.ended += event["error"]["code"] == "shutting_down"
                        if event["error"]["code"] != "shutting_down":
                            self.wrong.append(line)
                        return
                    text += event["choices"][0]["text"]

    def count(self, status):
        self.statuses[status] = self.statuses.get(status, 0) + 1

    def keep(self, key, text):
        self.completed += 1
        if self.texts.setdefault(key, text) != text:
            self.wrong.append(f"two texts for {key}")

    def run(self, clients):
        async def all_of_them():
            await asyncio.gather(*(self.client(number) for number in range(clients)))

        asyncio.run(all_of_them())
        return self

    def differences(self, llm):
        """The completions that differ from plain decoding."""
        wrong, greedy = [], {}
        for (prompt, seed, temperature, tokens), text in self.texts.items():
            options = {"max_new_tokens": tokens, "drafter": "off"}
            if temperature:
                plain = llm.generate(prompt, temperature=1.0, seed=seed, **options).text
            else:  # the same for every seed
                if (prompt, tokens) not in greedy:
                    greedy[prompt, tokens] = llm.generate(prompt, **options).text
                plain = greedy[prompt, tokens]
            if plain != text:
                wrong.append(f"{prompt!r}, seed {seed}, temperature {temperature}: {text!r}, not {plain!r}")
        return wrong
