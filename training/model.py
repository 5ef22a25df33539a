"""A small Llama for training on processors, and its export to transformers.

Contract: `Llama` computes the same function as `transformers.LlamaForCausalLM` with the
configuration that `Shape.llama()` gives (tied embeddings, RMSNorm, rotary positions, grouped
key/value heads, SwiGLU).  Weights are kept in fp32, matrices multiply in bfloat16.  Layers are
stacked in one tensor per kind (first axis: layer), so that the optimiser can treat them in
batches.  `state_dict_llama` gives the names and layout that transformers loads.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn


@dataclass(frozen=True)
class Shape:
    """Sizes of the model."""

    vocab: int = 4096
    hidden: int = 256
    layers: int = 6
    heads: int = 4
    kv_heads: int = 2
    ffn: int = 704
    positions: int = 2048
    theta: float = 10000.0
    eps: float = 1e-5

    @property
    def head_dim(self) -> int:
        return self.hidden // self.heads

    def llama(self, eos: int) -> dict:
        """The fields of the matching transformers.LlamaConfig."""
        return {
            "vocab_size": self.vocab,
            "hidden_size": self.hidden,
            "intermediate_size": self.ffn,
            "num_hidden_layers": self.layers,
            "num_attention_heads": self.heads,
            "num_key_value_heads": self.kv_heads,
            "head_dim": self.head_dim,
            "max_position_embeddings": self.positions,
            "rms_norm_eps": self.eps,
            "rope_parameters": {"rope_type": "default", "rope_theta": self.theta},
            "tie_word_embeddings": True,
            "bos_token_id": eos,
            "eos_token_id": eos,
            "pad_token_id": eos,
        }

    def asdict(self) -> dict:
        return asdict(self)


def _norm(x: Tensor, gain: Tensor, eps: float) -> Tensor:
    wide = x.float()
    scale = torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)
    return (wide * scale * gain).to(x.dtype)


def _rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    a, b = x.float().chunk(2, -1)
    return torch.cat((a * cos - b * sin, b * cos + a * sin), -1).to(x.dtype)


def attend(q: Tensor, k: Tensor, v: Tensor, block: int = 256) -> Tensor:
    """Causal attention over [batch, heads, time, dim], in blocks of queries.

    On processors this is several times faster to differentiate than the built-in kernel; blocks
    skip most of the masked half.
    """
    time, scale = q.shape[2], q.shape[3] ** -0.5
    out = []
    for lo in range(0, time, block):
        hi = min(lo + block, time)
        scores = (q[:, :, lo:hi] @ k[:, :, :hi].transpose(-1, -2)).float() * scale
        row = torch.arange(lo, hi, device=q.device)[:, None]
        hidden = torch.arange(hi, device=q.device)[None] > row
        p = scores.masked_fill(hidden, float("-inf")).softmax(-1).to(q.dtype)
        out.append(p @ v[:, :, :hi])
    return torch.cat(out, 2)


def layer(x, cos, sin, norm_attn, norm_ffn, qkv, o, wide, down, s: Shape) -> Tensor:
    """One block: attention and feed-forward, each with its norm and residual.

    A function of the module, so that a training script can put a compiled one in its place.
    """
    batch, time, _ = x.shape
    kv = s.kv_heads * s.head_dim
    y = F.linear(_norm(x, norm_attn, s.eps), qkv)
    q, k, v = y.split((s.hidden, kv, kv), -1)
    q = q.view(batch, time, s.heads, s.head_dim).transpose(1, 2)
    k = k.view(batch, time, s.kv_heads, s.head_dim).transpose(1, 2)
    v = v.view(batch, time, s.kv_heads, s.head_dim).transpose(1, 2)
    q, k = _rotate(q, cos, sin), _rotate(k, cos, sin)
    share = s.heads // s.kv_heads
    k, v = k.repeat_interleave(share, 1), v.repeat_interleave(share, 1)
    y = attend(q, k, v).transpose(1, 2).reshape(batch, time, s.hidden)
    x = x + F.linear(y, o)
    g, u = F.linear(_norm(x, norm_ffn, s.eps), wide).chunk(2, -1)
    return x + F.linear(F.silu(g.float()).to(x.dtype) * u, down)


class Llama(nn.Module):
    """The model; `forward(ids)` gives the final normed hidden states [batch, time, hidden]."""

    def __init__(self, shape: Shape, seed: int = 0) -> None:
        super().__init__()
        self.shape = shape
        gen = torch.Generator().manual_seed(seed)
        n, h, kv = shape.layers, shape.hidden, shape.kv_heads * shape.head_dim

        def matrix(*size: int, std: float) -> nn.Parameter:
            return nn.Parameter(torch.randn(*size, generator=gen) * std)

        small = h**-0.5
        self.embed = matrix(shape.vocab, h, std=0.02)
        self.q = matrix(n, h, h, std=small * 0.6)
        self.k = matrix(n, kv, h, std=small * 0.6)
        self.v = matrix(n, kv, h, std=small * 0.6)
        self.o = matrix(n, h, h, std=small * 0.2)
        self.gate = matrix(n, shape.ffn, h, std=small * 0.6)
        self.up = matrix(n, shape.ffn, h, std=small * 0.6)
        self.down = matrix(n, h, shape.ffn, std=shape.ffn**-0.5 * 0.2)
        self.norm_attn = nn.Parameter(torch.ones(n, h))
        self.norm_ffn = nn.Parameter(torch.ones(n, h))
        self.norm_out = nn.Parameter(torch.ones(h))
        freq = shape.theta ** -(torch.arange(0, shape.head_dim, 2).float() / shape.head_dim)
        angle = torch.arange(shape.positions).float()[:, None] * freq
        self.register_buffer("cos", angle.cos(), persistent=False)
        self.register_buffer("sin", angle.sin(), persistent=False)

    def matrices(self) -> list[nn.Parameter]:
        return [self.q, self.k, self.v, self.o, self.gate, self.up, self.down]

    def vectors(self) -> list[nn.Parameter]:
        return [self.norm_attn, self.norm_ffn, self.norm_out]

    def forward(self, ids: Tensor, dtype: torch.dtype = torch.bfloat16) -> Tensor:
        s = self.shape
        cos, sin = self.cos[: ids.shape[1]], self.sin[: ids.shape[1]]
        x = F.embedding(ids, self.embed).to(dtype)
        qkv = torch.cat((self.q, self.k, self.v), 1).to(dtype)
        wide = torch.cat((self.gate, self.up), 1).to(dtype)
        o, down = self.o.to(dtype), self.down.to(dtype)
        for i in range(s.layers):
            norms = self.norm_attn[i], self.norm_ffn[i]
            x = layer(x, cos, sin, *norms, qkv[i], o[i], wide[i], down[i], s)
        return _norm(x, self.norm_out, s.eps)

    def state_dict_llama(self) -> dict[str, Tensor]:
        """The weights under the names of transformers.LlamaForCausalLM (embedding tied)."""
        out = {"model.embed_tokens.weight": self.embed, "model.norm.weight": self.norm_out}
        names = {
            "self_attn.q_proj": self.q,
            "self_attn.k_proj": self.k,
            "self_attn.v_proj": self.v,
            "self_attn.o_proj": self.o,
            "mlp.gate_proj": self.gate,
            "mlp.up_proj": self.up,
            "mlp.down_proj": self.down,
            "input_layernorm": self.norm_attn,
            "post_attention_layernorm": self.norm_ffn,
        }
        for name, stack in names.items():
            for i in range(self.shape.layers):
                out[f"model.layers.{i}.{name}.weight"] = stack[i]
        return {name: value.detach().clone().contiguous() for name, value in out.items()}


class TiedLoss(torch.autograd.Function):
    """Weighted cross-entropy of a tied head, chunk by chunk; gradients are made in the forward.

    Never holds more than `chunk` rows of logits.  Weights of 0 leave a position out.
    """

    @staticmethod
    def forward(ctx, hidden: Tensor, embed: Tensor, target: Tensor, chunk: int) -> Tensor:
        low = embed.to(hidden.dtype)
        rows = hidden.shape[0]
        d_hidden = torch.empty_like(hidden)
        d_embed = torch.zeros_like(embed)
        total = hidden.new_zeros((), dtype=torch.float32)
        for lo in range(0, rows, chunk):
            part, goal = hidden[lo : lo + chunk], target[lo : lo + chunk]
            loss, grad = head(F.linear(part, low), goal, 1.0 / rows)
            total += loss
            d_hidden[lo : lo + chunk] = grad @ low
            d_embed += (grad.t() @ part).float()
        ctx.save_for_backward(d_hidden, d_embed)
        return total / rows

    @staticmethod
    def backward(ctx, scale: Tensor):
        d_hidden, d_embed = ctx.saved_tensors
        return d_hidden * scale.to(d_hidden.dtype), d_embed * scale, None, None


def head(logits: Tensor, goal: Tensor, weight: float) -> tuple[Tensor, Tensor]:
    wide = logits.float()
    lse = wide.logsumexp(-1, keepdim=True)
    loss = (lse - wide.gather(-1, goal[:, None])).sum()
    hit = torch.arange(wide.shape[-1])[None] == goal[:, None]
    grad = ((wide - lse).exp() - hit.float()) * weight
    return loss, grad.to(logits.dtype)
