"""Measurement: does drafting pay off here? Methods side by side on the same prompts, step costs, tables.

    from lookahead.bench import run
    records = run(["lookahead:15,5,15"], ["def fibonacci(n):"])

The life of a measurement:
    workloads.load_workload   a file, or "stdlib" -> prompts
    methods.load_model        the model under test: weights, tokenizer, target
    methods.make_methods      a name -> methods that decode prompts and record the cost of each completion
    run.run                   methods interleaved prompt by prompt -> records
    record.Records            one JSON line each, kept across interrupts
    report                    figures and a table, computed from records
    step_cost                 the time of a step by its number of rows
"""

from .methods import (
    ModelUnderTest,
    RunOptions,
    default_methods,
    load_model,
    make_methods,
    split_methods,
)
from .record import Records
from .report import summarise
from .run import run
from .workloads import Prompt, load_workload

__all__ = [
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
