"""Which operations of a transformers model depend on the number of rows of a pass, bit by bit?

While a step is watched, each operation is evaluated again on every row alone, with the inputs that the row had in
the step, so a difference is that of the operation itself and not of those before it. An operation is a module that
maps a tensor with one row per token to another one, or the attention between a row and the keys that it sees. Of
modules within each other, the innermost that differs counts. What is not looked at: rotations, residual sums, modules
with several inputs, and the attention of models that do not use transformers' attention functions.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch

from .attention_hook import implementation

NAME = "lookahead_rows"
_BITS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


class RowOperations:
    """Watches the steps of one model. ``found`` has, by kind of operation, what differed.

    Args:
        module: a causal language model of transformers, whose passes run its modules.
    """

    def __init__(self, module: Any) -> None:
        self._module = module
        self._seen: dict[str, set[str]] = {}  # kind -> names of the operations that were looked at
        self._differ: dict[str, dict[str, int]] = {}  # kind -> name -> the fewest rows
        self._off: dict[str, str] = {}  # of this step: name -> kind
        self._again = False

    @contextmanager
    def watched(self, rows: int) -> Iterator[None]:
        """A context for one step of ``rows`` rows, which are seen in increasing order of ``rows``."""
        self._off = {}
        known = self._known()
        with ExitStack() as stack:
            for name, module in self._module.named_modules():
                if name in known:
                    continue
                hook = module.register_forward_hook(self._hook(name, rows), with_kwargs=True)
                stack.callback(hook.remove)
            if getattr(self._module, "_supports_attention_backend", False):
                stack.enter_context(self._attention(rows, known))
            yield
        off = {*self._off, *self._known()}
        for name, kind in self._off.items():
            if not any(other.startswith(f"{name}.") for other in off):
                self._differ.setdefault(kind, {})[name] = rows

    def found(self) -> list[dict[str, Any]]:
        """The kinds of operations that were looked at: how many, and how many differ from how many rows on."""
        return [
            {
                "operation": kind,
                "of": len(names),
                "differ": len(self._differ.get(kind, {})),
                "from_rows": min(self._differ.get(kind, {}).values(), default=None),
            }
            for kind, names in self._seen.items()
        ]

    def _known(self) -> set[str]:
        """The operations that differed with fewer rows, which are not looked at again."""
        return {name for names in self._differ.values() for name in names}

    def _note(self, kind: str, name: str, same: bool) -> None:
        self._seen.setdefault(kind, set()).add(name)
        if not same:
            self._off[name] = kind

    def _hook(self, name: str, rows: int) -> Any:
        def compare(module: torch.nn.Module, inputs: Any, keywords: Any, output: Any) -> None:
            given = inputs[0] if len(inputs) == 1 and not keywords else None
            if self._again or not isinstance(given, torch.Tensor) or not isinstance(output, torch.Tensor):
                return
            if rows not in given.shape[:2] or output.shape[:2] != given.shape[:2]:
                return  # not one row per token
            axis = given.shape.index(rows)
            self._again = True
            try:
                alone = [module(given.narrow(axis, row, 1)) for row in range(rows)]
            finally:
                self._again = False
            kind = f"{type(module).__name__} {name.rpartition('.')[2]}"
            self._note(kind, name, same_bits(torch.cat(alone, axis), output))

        return compare

    @contextmanager
    def _attention(self, rows: int, known: set[str]) -> Iterator[None]:
        from transformers import AttentionInterface
        from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

        used = str(self._module.config._attn_implementation)
        used = "sdpa" if used.startswith(("flash", "flex", "kernels")) else used  # as in a step with a mask
        names = {module: name for name, module in self._module.named_modules()}

        def attend(module: Any, query: Any, key: Any, value: Any, mask: Any, **options: Any) -> Any:

            eager = getattr(sys.modules[type(module).__module__], "eager_attention_forward", None)
            function = ALL_ATTENTION_FUNCTIONS.get_interface(used, eager)
            output, weights = function(module, query, key, value, mask, **options)
            name = f"{names[module]}.attention"
            if mask is not None and query.shape[2] == rows and name not in known:
                same = True
                for row in range(rows):
                    sees = mask[0, 0, row]
                    sees = sees if sees.dtype == torch.bool else sees == 0
                    columns = sees[: key.shape[2]].nonzero()[:, 0]
                    seen = (part[:, :, columns] for part in (key, value))
                    alone, _ = function(module, query[:, :, row : row + 1], *seen, None, **options)
                    same &= same_bits(alone, output[:, row : row + 1])
                self._note(f"attention ({used})", name, same)
            return output, weights

        AttentionInterface.register(NAME, attend)
        with implementation(self._module, NAME):
            yield


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Whether two tensors of one dtype and shape have the same bits."""
    bits = _BITS[a.element_size()]
    return torch.equal(a.contiguous().view(bits), b.contiguous().view(bits))
