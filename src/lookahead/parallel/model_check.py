"""Every rank must hold the same model on the same kind of device: compared once, before the first token."""

from __future__ import annotations

from typing import Any

import torch

from ..core import SettingsError, Target
from .connect import Connections
from .errors import RankError


def check_same_model(connections: Connections, target: Target, model: Any = None) -> None:
    """Refuse to decode unless every rank holds the same; arguments as of ``join``.

    Raises:
        SettingsError: on every rank, naming the rank that differs and in what.
    """
    model = model if model is not None else getattr(target, "model", None)
    _refuse_split_models(model)
    facts = _facts(target, model)
    if connections.rank:
        link = connections.links[0]
        link.send("facts", facts=facts)
        answer = link.receive()
        if answer["kind"] == "stop":
            raise SystemExit(0)  # rank 0 had nothing to decode
        if answer["kind"] != "model_check":
            raise RankError(0, f"rank 0 sent {answer['kind']!r} for model_check; start all ranks alike")
        problem = answer["problem"]
    else:
        problem = ""
        for rank, link in connections.links.items():
            theirs = link.receive()["facts"]
            differ = [name for name in facts if facts[name] != theirs[name]]
            # Other facts tell more than a checksum that differs because of them.
            if differ and not problem:
                problem = (
                    f"every rank must hold the same model on the same kind of device, and rank {rank} "
                    f"differs from rank 0 in: {', '.join(differ[1:] or differ)}; "
                    "load the same files with the same settings"
                )
        for link in connections.links.values():
            link.send("model_check", problem=problem)
        for link in connections.links.values():
            link.flush()
    if problem:
        raise SettingsError(problem)


def dismiss(connections: Connections) -> None:
    """On rank 0, in place of ``join``: there is nothing to decode, the other ranks may leave."""
    for link in connections.links.values():
        link.receive()
        link.send("stop")
        link.flush()
    connections.close()


def _facts(target: Target, model: Any) -> dict[str, int | str]:
    """What two ranks must have in common, the checksum first."""
    tensors = list(model.parameters()) if model is not None else []
    first = tensors[0] if tensors else torch.empty(0)
    return {
        "model checksum": fingerprint(tensors),
        "parameters": sum(tensor.numel() for tensor in tensors),
        "vocabulary": target.vocabulary,
        "dtype": str(first.dtype),
        "device type": first.device.type,
        "target": type(target).__name__,
    }


def fingerprint(tensors: list[torch.Tensor]) -> int:
    """A checksum of the tensors' bits, from one pass over each on its own device."""
    total = 0
    for number, tensor in enumerate(tensors):
        whole = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[tensor.element_size()]
        bits = tensor.detach().contiguous().view(-1).view(whole)
        first_half = bits[: bits.numel() // 2].sum(dtype=torch.int64)
        checksum = int(bits.sum(dtype=torch.int64)) * 3 + int(first_half)
        total = (total * 31 + checksum * (number + 1)) % ((1 << 61) - 1)
    return total


def _refuse_split_models(model: Any) -> None:
    parameters = model.parameters() if isinstance(model, torch.nn.Module) else ()
    meshes = [getattr(parameter, "device_mesh", None) for parameter in parameters]  # of distributed tensors
    split = max([getattr(model, "tp_size", None) or 1, *(mesh.size() for mesh in meshes if mesh is not None)])
    if split > 1:
        raise SettingsError(
            f"lookahead parallelism needs the whole model on every rank, and this one is split over {split} "
            "ranks by tensor parallelism; use one or the other"
        )
