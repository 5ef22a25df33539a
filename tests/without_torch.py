"""Runs a program in which torch, transformers, gguf and accelerate cannot be imported.

python tests/without_torch.py FILE.gguf ...     loads and decodes each file, and prints its tokens as JSON
"""

import importlib.abc
import importlib.util
import json
import sys

ABSENT = {"torch", "transformers", "gguf", "accelerate"}
find_spec = importlib.util.find_spec


class Absent(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in ABSENT:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)


def main(files):
    sys.meta_path.insert(0, Absent())
    importlib.util.find_spec = lambda name, package=None: (
        None if name.split(".")[0] in ABSENT else find_spec(name, package)
    )
    import lookahead
    from lookahead.core import SettingsError

    def message(call):
        try:
            call()
        except (SettingsError, ImportError) as error:
            return str(error)

    report = {"tokens": [], "errors": []}
    for file in files:
        llm = lookahead.load(file, drafter="7,5,7")
        for options in ({}, {"temperature": 0.8, "top_p": 0.9, "repetition_penalty": 1.2, "seed": 3}):
            result = llm.generate("ab ab ab", max_new_tokens=8, ignore_eos=True, **options)
            report["tokens"].append(result.tokens)
    for wrong in ({"path_or_id": "tiny"}, {"device": "cuda"}, {"dtype": "bfloat16"}, {"weights": "q8_0"}):
        report["errors"].append(
            message(lambda wrong=wrong: lookahead.load(**{"path_or_id": files[0], **wrong}))
        )
    report["errors"].append(message(lambda: lookahead.generate))
    print(json.dumps(report))


if __name__ == "__main__":
    main(sys.argv[1:])
