"""Write a checkpoint as a transformers model folder, and check that both compute the same.

Contract: reads `checkpoint.pt` and `tokenizer.json` from `--work-dir`; writes config.json,
generation_config.json, model.safetensors, tokenizer.json and tokenizer_config.json to `--out`
(README.md there is left alone).  `--blend` averages the weights of two checkpoints.  Ends with an
error where the logits of the exported model differ from those of the trained one by more than
rounding; then the weights are rounded to what `smaller` keeps of them.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import torch
from corpus import EOS
from model import Llama, Shape
from safetensors.torch import load_file, save_file
from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast


def to_llama(net: Llama, eos: int = 0) -> LlamaForCausalLM:
    """The same weights in transformers' own model."""
    model = LlamaForCausalLM(LlamaConfig(**net.shape.llama(eos)))
    load_into(model, net)
    return model.eval()


def load_into(model: LlamaForCausalLM, net: Llama) -> None:
    wrong = model.load_state_dict(net.state_dict_llama(), strict=False)
    if wrong.unexpected_keys or set(wrong.missing_keys) - {"lm_head.weight"}:
        raise ValueError(f"weights do not fit: {wrong}")
    model.tie_weights()


@torch.no_grad()
def difference(net: Llama, model: LlamaForCausalLM) -> float:
    """Largest difference of the logits on random tokens, both in fp32."""
    gen = torch.Generator().manual_seed(0)
    ids = torch.randint(0, net.shape.vocab, (2, 300), generator=gen)
    own = net(ids, dtype=torch.float32) @ net.embed.t()
    return float((own - model(input_ids=ids).logits).abs().max())


def load(path: Path) -> tuple[Llama, dict]:
    saved = torch.load(path, weights_only=False)
    net = Llama(Shape(**saved["shape"]))
    net.load_state_dict(saved["net"])
    return net, saved


@torch.no_grad()
def blend(net: Llama, other: Llama, share: float) -> None:
    """Average weights before and after fine-tuning in place (Wortsman et al. 2022)."""
    for mine, its in zip(net.parameters(), other.parameters(), strict=True):
        mine.lerp_(its, share)


def smaller(name: str, weight: torch.Tensor) -> torch.Tensor:
    """Matrices in float8_e4m3fn and embeddings in bfloat16, both to the nearest; norms as they are.

    Loaders widen them exactly to float32 or bfloat16. Their bits per byte on held-out texts stay the same.
    """
    if weight.ndim == 1:
        return weight
    return weight.to(torch.bfloat16 if "embed" in name else torch.float8_e4m3fn)


def write(net: Llama, tokenizer: Path, out: Path) -> int:
    """Export; the size of the weights in bytes."""
    model = to_llama(net)
    if (gap := difference(net, model)) > 1e-3:
        raise SystemExit(f"logits of the export differ by {gap:.2g}")
    model.generation_config = GenerationConfig(
        bos_token_id=0, eos_token_id=0, pad_token_id=0, do_sample=False
    )
    out.mkdir(parents=True, exist_ok=True)
    model.save_pretrained(out)
    fast = PreTrainedTokenizerFast(
        tokenizer_file=str(tokenizer),
        bos_token=EOS,
        eos_token=EOS,
        pad_token=EOS,
        model_max_length=net.shape.positions,
        clean_up_tokenization_spaces=False,
    )
    fast.save_pretrained(out)
    config = out / "tokenizer_config.json"
    fields = json.loads(config.read_text()) | {"tokenizer_class": "PreTrainedTokenizerFast"}
    config.write_text(json.dumps(fields, indent=2) + "\n")  # the name that 4.x knows too
    weights = {name: smaller(name, weight) for name, weight in load_file(out / "model.safetensors").items()}
    save_file(weights, out / "model.safetensors", metadata={"format": "pt"})
    (out / "model.safetensors").chmod(0o644)
    return (out / "model.safetensors").stat().st_size


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--work-dir", type=Path, default=Path("build/training"))
    parser.add_argument("--checkpoint", type=Path, help="default: checkpoint.pt of --work-dir")
    parser.add_argument("--blend", type=Path, help="average with this checkpoint")
    parser.add_argument("--share", type=float, default=0.5, help="of --blend in the average")
    parser.add_argument("--out", type=Path, default=Path("src/lookahead/models/bundled"))
    args = parser.parse_args()
    path = args.checkpoint or args.work_dir / "checkpoint.pt"
    if not path.is_file():
        parser.error(f"{path} is missing: run training/train.py first")
    net, saved = load(path)
    if args.blend:
        blend(net, load(args.blend)[0], args.share)
    size = write(net, args.work_dir / "tokenizer.json", args.out)
    print(f"step {saved['step']}, {saved['tokens']} tokens -> {args.out}, {size / 1e6:.1f} MB")


if __name__ == "__main__":
    main()
