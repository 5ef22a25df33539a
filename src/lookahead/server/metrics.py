"""Metrics for Prometheus, named like vLLM's, with the prefix lookahead_."""

from __future__ import annotations

from collections import abc
from time import monotonic
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from ..core import Result, Sequence, Stats, Update

SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300, 600)
ROWS = (1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 192, 256, 512)
#: Number of positions in a draft that have separate counters.
POSITIONS = 16


class Metrics:
    """All metrics of one server, in a separate registry."""

    def __init__(self) -> None:
        self.registry = registry = CollectorRegistry()

        def counter(name: str, help: str, *labels: str) -> Counter:
            return Counter(f"lookahead_{name}", help, labels, registry=registry)

        def gauge(name: str, help: str) -> Gauge:
            return Gauge(f"lookahead_{name}", help, registry=registry)

        def histogram(name: str, help: str, buckets: tuple[float, ...]) -> Histogram:
            return Histogram(f"lookahead_{name}", help, registry=registry, buckets=buckets)

        self.http = counter("http_requests", "HTTP responses by route and status", "route", "status")
        self.success = counter("request_success", "Completions by finish reason", "finished_reason")
        self.running = gauge("num_requests_running", "Sequences being decoded")
        self.waiting = gauge("num_requests_waiting", "Sequences waiting for a slot")
        self.first = histogram("time_to_first_token_seconds", "From arrival to the first token", SECONDS)
        self.each = histogram(
            "time_per_output_token_seconds",
            "Mean time per token of a completion, without the first token",
            SECONDS,
        )
        self.whole = histogram("e2e_request_latency_seconds", "From arrival to the last token", SECONDS)
        self.prompt = counter("prompt_tokens", "Prompt tokens")
        self.cached = counter("prefix_cache_hits", "Prompt tokens whose keys and values were reused")
        self.generated = counter("generation_tokens", "Tokens emitted")
        self.drafts = counter("spec_decode_num_drafts", "Steps with draft tokens")
        self.drafted = counter("spec_decode_num_draft_tokens", "Draft tokens")
        self.accepted = counter("spec_decode_num_accepted_tokens", "Accepted draft tokens")
        self.by_position = counter(
            "spec_decode_num_accepted_tokens_per_pos", "Accepted tokens by position in the draft", "position"
        )
        self.rows = histogram("rows_per_step", "Rows of all trees in a forward pass", ROWS)
        self.step = histogram(
            "step_seconds", "Wall-clock time of a forward pass, including drafting and verification", SECONDS
        )
        self.cache = gauge("kv_cache_tokens", "Cached tokens of running sequences")

    def stepped(self, updates: abc.Sequence[Update], seconds: float) -> None:
        """Count a forward pass and its wall-clock time, including drafting and verification."""
        rows = sum(update.rows for update in updates)
        if rows:
            self.rows.observe(rows)
        self.step.observe(seconds)
        self.generated.inc(sum(len(update.tokens) for update in updates))

    def held(self, tokens: int, running: int, waiting: int) -> None:
        """Set the gauges: cached tokens of running sequences, running sequences, waiting sequences."""
        self.cache.set(tokens)
        self.running.set(running)
        self.waiting.set(waiting)

    def ended(self, sequence: Sequence, result: Result) -> None:
        """Count a finished sequence."""
        now = monotonic()
        stats = result.stats
        first = sequence.first_token
        self.success.labels(result.finish_reason).inc()
        self.whole.observe(now - sequence.added)
        self.prompt.inc(stats.prompt_tokens if stats.seconds["prefill"] else 0)
        self.cached.inc(sequence.cached)
        if first is not None:
            self.first.observe(first - sequence.added)
            if stats.new_tokens > 1:
                self.each.observe((now - first) / (stats.new_tokens - 1))
        record = speculation(stats)
        self.drafts.inc(record["num_spec_steps"])
        self.drafted.inc(stats.drafted)
        self.accepted.inc(stats.accepted)
        for position in range(POSITIONS):
            reached = sum(n for size, n in stats.tokens_per_step.items() if size - 1 > position)
            if reached:
                self.by_position.labels(str(position)).inc(reached)

    def page(self) -> bytes:
        """The body of /metrics."""
        return generate_latest(self.registry)


def speculation(stats: Stats) -> dict[str, Any]:
    """The statistics of one completion under vLLM's names; the mean includes the bonus token.

    With --remember, the version of the table that the request used is one of them.
    """
    version = stats.drafter.get("remembered")
    return ({} if version is None else {"remembered": version}) | {
        "mean_acceptance_length": round(stats.compression_ratio, 4),
        "draft_acceptance_rate": round(stats.acceptance_rate, 4),
        "acceptance_histogram": {str(n - 1): steps for n, steps in sorted(stats.tokens_per_step.items())},
        "num_spec_steps": sum(n for rows, n in stats.rows_per_step.items() if rows > 1),
        "num_accepted_draft_tokens": stats.accepted,
        "num_draft_tokens": stats.drafted,
        "num_steps": stats.steps,
        "rows": stats.rows,
    }
