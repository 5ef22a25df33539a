"""Measurement: workloads, methods side by side, step costs, reports and plots.

    from lookahead.bench import run
    records = run(["hf-greedy", "lookahead:15,5,15"], ["def fibonacci(n):"])

The life of a measurement:
    workloads.load_workload   a name or a file -> prompts
    model.load_model          the model under test: weights, tokenizer, target
    methods.make_methods      a name -> what decodes a prompt, ours or Hugging Face's, under one counter
    run.run                   interleaved prompt by prompt -> records
    record.Records            one JSON line each, kept across interrupts
    summary, report           read records, and nothing else: tables and the picture
"""

from .method import RunOptions
from .methods import default_methods, make_methods, split_methods
from .model import ModelUnderTest, load_model
from .record import Records
from .run import run
from .summary import summarise
from .workloads import KNOWN, Prompt, load_workload

__all__ = [
    "KNOWN",
    "ModelUnderTest",
    "Prompt",
    "Records",
    "RunOptions",
    "default_methods",
    "load_model",
    "load_workload",
    "make_methods",
    "run",
    "split_methods",
    "summarise",
]
