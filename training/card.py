"""Write the model card of the bundled model from the figures of its run.

Contract: reads `stats.json` (corpus.py), `log.jsonl` (train.py and antiloop.py) and the JSON files
of evaluate.py before and after the last stage; writes README.md into the model folder.  Every
figure comes from these files or from the weights; samples are the first of each kind, unchosen.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from safetensors import safe_open


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add = parser.add_argument
    add("--model", type=Path, default=Path("src/lookahead/models/bundled"))
    add("--work-dir", type=Path, default=Path("build/training"))
    add("--log", type=Path, default=Path("training/log.jsonl"))
    add("--before", type=Path, required=True, help="evaluate.py --out before the last stage")
    add("--after", type=Path, required=True, help="evaluate.py --out of the model shipped")
    add("--machine", default="2 processor cores", help="what it was trained on, for the card")
    add("--seeds", default="1 (corpus, main stage), 2 (last stage)")
    add("--share", type=float, default=0.27, help="--maths of train.py")
    add("--blend", type=float, default=0.7, help="--share of export.py")
    add("--notes", default="", help="what else a reader must know about this run")
    args = parser.parse_args()
    for path in (args.before, args.after, args.log, args.work_dir / "stats.json"):
        if not path.is_file():
            parser.error(f"{path} is missing")
    before, after = json.loads(args.before.read_text()), json.loads(args.after.read_text())
    stats = json.loads((args.work_dir / "stats.json").read_text())
    log = [json.loads(line) for line in args.log.read_text().splitlines()]
    config = json.loads((args.model / "config.json").read_text())
    weights = args.model / "model.safetensors"
    with safe_open(weights, "pt") as file:
        sizes = [file.get_slice(name).get_shape() for name in file.keys()]  # noqa: SIM118
    params = sum(s[0] * (s[1] if len(s) > 1 else 1) for s in sizes)
    main_steps = max(row["step"] for row in log if row.get("stage") != "antiloop")

    def line(name: str, key: str, form: str) -> str:
        cells = [format(run[k][key], form) for k in ("code", "maths") for run in (before, after)]
        return f"| {name} | " + " | ".join(cells) + " |"

    text = (
        Path(__file__)
        .with_name("card.md.in")
        .read_text(encoding="utf-8")
        .format(
            params=params / 1e6,
            params_exact=params,
            layers=config["num_hidden_layers"],
            hidden=config["hidden_size"],
            heads=config["num_attention_heads"],
            kv=config["num_key_value_heads"],
            ffn=config["intermediate_size"],
            vocab=config["vocab_size"],
            positions=config["max_position_embeddings"],
            longest=max(row.get("length", 0) for row in log),
            megabytes=weights.stat().st_size / 1e6,
            steps=log[-1]["step"],
            anti_steps=log[-1]["step"] - main_steps,
            tokens=log[-1]["tokens"] / 1e6,
            minutes=log[-1]["elapsed_s"] / 60,
            machine=args.machine,
            seeds=args.seeds,
            share=args.share,
            blend=args.blend,
            keep=1 - args.blend,
            notes=args.notes,
            rows="\n".join(
                [
                    line("bits per byte", "bits_per_byte", ".3f"),
                    line("greedy continuations that loop", "loop_share", ".1%"),
                    line("that end within 128 tokens", "ended_share", ".1%"),
                    line("mean length, tokens", "mean_tokens", ".0f"),
                ]
            ),
            prompts=after["code"]["prompts"],
            documents=after["code"]["documents"],
            documents_maths=after["maths"]["documents"],
            maths_documents=stats["maths"]["documents"],
            maths_tokens=stats["maths"]["tokens"] / 1e6,
            code_documents=stats["code"]["documents"],
            code_tokens=stats["code"]["tokens"] / 1e6,
            dropped=stats["code"]["dropped_loops"],
            sources="\n".join(
                f"| {r['name']} | {r['version']} | {r['licence']} | {r['bytes'] / 1e6:.2f} | "
                f"{r['documents']} | {'x' + str(r['repeat']) if r['repeat'] > 1 else ''} |"
                for r in stats["sources"]
                if r["documents"]
            ),
        )
    )
    for kind, count in (("code", 4), ("maths", 4)):
        for prompt, told, loops in after[kind].get("samples", [])[:count]:
            text += f"\n{kind}{', loops' if loops else ''}:\n\n~~~text\n{prompt}⟦{told}⟧\n~~~\n"
    (args.model / "README.md").write_text(text, encoding="utf-8")
    print(f"{args.model / 'README.md'} written")


if __name__ == "__main__":
    main()
