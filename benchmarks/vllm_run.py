"""One run of ``benchmarks.vllm``, in a separate process: reads its task as JSON, prints its measurements as JSON.

    {"prompts": [[ids], ...], "tokens": 64, "clients": 4, "engine": {...}}

``engine`` has arguments of vllm.LLM; ``temperature`` is optional.

It imports only vLLM, because vLLM 0.32 cannot start on a CPU after numba has been imported.
"""

from __future__ import annotations

import json
import os
import sys
from statistics import median
from time import perf_counter
from typing import Any

#: Tokens of the warm-up.
WARM_UP = 128
#: Marks the line with the result, because the engine prints too.
RESULT = "RESULT "


def run(given: dict[str, Any]) -> dict[str, Any]:
    """Decode the prompts, ``clients`` at a time."""
    import vllm
    from vllm.sampling_params import RequestOutputKind

    llm = vllm.LLM(
        enforce_eager=True, disable_log_stats=False, max_num_seqs=given["clients"], **given["engine"]
    )
    params = vllm.SamplingParams(
        temperature=given.get("temperature", 0),
        max_tokens=given["tokens"],
        output_kind=RequestOutputKind.DELTA,
    )
    engine, prompts = llm.llm_engine, given["prompts"]
    # Warm up with as many requests. The first run of a method that measures the cost of steps does so here.
    short = [{"prompt_token_ids": [1, 2, 3 + number]} for number in range(given["clients"])]
    llm.generate(short, vllm.SamplingParams(max_tokens=WARM_UP, ignore_eos=True), use_tqdm=False)
    texts: list[list[int]] = [[] for _ in prompts]
    steps, sent, running = [0] * len(prompts), 0, set()
    emitted, durations = 0, []
    start = perf_counter()
    while sent < len(prompts) or running:
        while sent < len(prompts) and len(running) < given["clients"]:
            engine.add_request(str(sent), {"prompt_token_ids": prompts[sent]}, params.clone())
            running.add(sent)
            sent += 1
        has_prompts = not all(texts[number] for number in running)
        before = perf_counter()
        outputs = engine.step()
        seconds = perf_counter() - before
        for output in outputs:
            number, tokens = int(output.request_id.partition("-")[0]), output.outputs[0].token_ids
            steps[number] += bool(texts[number])  # the prompt's own step is none
            texts[number] += tokens
            emitted += 0 if has_prompts else len(tokens)
            if output.finished:
                running.discard(number)
        if not has_prompts:
            durations.append(seconds)
    return {
        "vllm": vllm.__version__,
        "seconds": perf_counter() - start,
        "decoding": [emitted, sum(durations)],  # tokens and seconds of the steps without prompts
        "step": median(durations),
        "preemptions": sum(
            metric.value for metric in llm.get_metrics() if metric.name == "vllm:num_preemptions"
        ),
        "steps": steps,
        "texts": texts,
    }


if __name__ == "__main__":
    os.environ |= {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_LOGGING_LEVEL": "ERROR"}
    os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
    print(RESULT + json.dumps(run(json.load(sys.stdin))))
