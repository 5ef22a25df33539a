"""Measurement: workloads, methods, records, pictures, and the paper's results.

    from lookahead.bench import run
    records = run(["hf-greedy", "lookahead:15,5,15"], ["def fibonacci(n):"])

The life of a measurement:
    workloads.load_workload   a name or a file -> prompts
    subject.load_subject      the model, its tokenizer, its target
    methods.make_methods      a name -> what decodes a prompt, ours or Hugging Face's, under one counter
    run.run                   interleaved prompt by prompt -> records
    record.Records            one JSON line each, kept across interrupts
    summary, pictures         read records, and nothing else
"""

from .methods import Options, default_methods, make_methods, split_methods
from .pictures import plot
from .record import Records
from .run import run
from .subject import Subject, load_subject
from .summary import summarise
from .workloads import KNOWN, Prompt, load_workload

__all__ = [
    "KNOWN",
    "Options",
    "Prompt",
    "Records",
    "Subject",
    "default_methods",
    "load_subject",
    "load_workload",
    "make_methods",
    "plot",
    "run",
    "split_methods",
    "summarise",
]
