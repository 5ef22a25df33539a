"""Starting: the processes that torchrun made find each other and compare what they hold.

Every rank must hold the same model on the same kind of device. That is compared once, at the start, by a
checksum of the parameters, because nothing later would show it but wrong text.
"""

from __future__ import annotations

import os
import platform
import zlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from ..core import LookaheadError, SettingsError
from .errors import RankError
from .wire import Kind, Link, pack_text, unpack_text

#: Seconds of silence after which rank 0 counts another rank as hung; the others end within twice that.
TIMEOUT = 120.0
_FACTS = ("model checksum", "parameters", "vocabulary", "dtype", "device type", "target")


@dataclass(slots=True)
class Group:
    """The ranks that decode together.

    Attributes:
        rank: this process, 0 decides and prints.
        size: R.
        links: on rank 0 one per other rank; elsewhere the one to rank 0.
        backend: what carries rows of logits: "gloo" or "nccl".
        timeout: seconds of silence after which a rank counts as hung.
    """

    rank: int
    size: int
    links: dict[int, Link]
    backend: str
    timeout: float
    owns_process_group: bool = field(default=False)

    def close(self) -> None:
        """Take the process group down if this module brought it up."""
        if self.owns_process_group and dist.is_initialized():
            dist.destroy_process_group()


def started_by_torchrun() -> bool:
    """Whether this process is one of several that torchrun started."""
    return int(os.environ.get("WORLD_SIZE", "1")) > 1 and "RANK" in os.environ


def local_device() -> str:
    """The device this rank should put its model on: its own GPU, or "cpu"."""
    if not torch.cuda.is_available():
        return "cpu"
    index = int(os.environ.get("LOCAL_RANK", "0"))
    if index >= torch.cuda.device_count():
        raise SettingsError(
            f"every rank needs a GPU of its own, and local rank {index} finds {torch.cuda.device_count()}; "
            f"start at most {torch.cuda.device_count()} processes per node"
        )
    return f"cuda:{index}"


def start(
    backend: str | None = None, timeout: float = TIMEOUT, device: str | torch.device | None = None
) -> Group:
    """Join the other ranks; to be called once by every process.

    Args:
        backend: what carries rows of logits, "gloo" or "nccl"; by default nccl where it is present and every
            rank has a GPU of its own.
        timeout: seconds of silence after which rank 0 counts a rank as hung; the others end within twice that.
        device: where this rank has its model; None for ``local_device()``.

    Raises:
        SettingsError: not started by torchrun, a backend that is not there, or GPUs that ranks share under nccl.
        LookaheadError: the ranks did not all appear in time.
    """
    if not 0 < timeout < float("inf"):
        raise SettingsError(f"the timeout must be a positive number of seconds, got {timeout}")
    _check_backend(backend)
    owns = not dist.is_initialized()
    if owns:
        if "RANK" not in os.environ or "WORLD_SIZE" not in os.environ:
            raise SettingsError(
                "lookahead parallelism needs several processes, and this one was started alone; "
                "use torchrun --nproc-per-node R (2 or more) -m lookahead ..."
            )
        try:
            dist.init_process_group("gloo", timeout=timedelta(seconds=timeout))
        except (RuntimeError, ValueError) as error:
            first_line = (str(error).splitlines() or [""])[0][:200]
            raise LookaheadError(
                f"the {os.environ['WORLD_SIZE']} ranks did not all appear within {timeout:g} s: {first_line}"
            ) from error
    rank, size = dist.get_rank(), dist.get_world_size()
    span = timedelta(seconds=timeout)
    where = torch.device(device if device is not None else local_device())
    if where.type == "cuda":
        torch.cuda.set_device(
            where
        )  # nccl takes the current device, which is the first one until this is said
    backend = _choose_backend(backend, _gather(place_of(where)))
    rows = dist.new_group(backend="nccl", timeout=span) if backend == "nccl" else None
    links = {}
    for other in range(1, size):
        pair = dist.new_group([0, other], backend="gloo", timeout=span)
        if rank == 0:
            links[other] = Link(other, pair, timeout, rows)
        elif rank == other:
            # Longer, so that it is rank 0 that names a silent rank, and this one still hears the name.
            links[0] = Link(0, pair, 2 * timeout, rows)
    return Group(rank, size, links, backend, timeout, owns)


def place_of(device: torch.device) -> list[int]:
    """What tells one rank's device from another's: (nccl could be used, machine, GPU)."""
    if device.type != "cuda":
        return [0, 0, 0]
    properties = torch.cuda.get_device_properties(device)
    name = str(getattr(properties, "uuid", device.index))
    return [int(dist.is_nccl_available()), _stable(platform.node()), _stable(name)]


def _gather(numbers: list[int]) -> list[list[int]]:
    """The numbers of every rank, on every rank."""
    every = [torch.zeros(len(numbers), dtype=torch.int64) for _ in range(dist.get_world_size())]
    try:
        dist.all_gather(every, torch.tensor(numbers))
    except RuntimeError as error:
        first_line = (str(error).splitlines() or [""])[0][:200]
        raise LookaheadError(f"a rank ended while the ranks were finding each other: {first_line}") from error
    return [one.tolist() for one in every]


def _choose_backend(backend: str | None, places: Sequence[Sequence[int]]) -> str:
    """What carries rows of logits; all ranks come to the same answer.

    Args:
        places: ``place_of`` every rank's device.
    """
    problem = ""
    for rank, place in enumerate(places):
        twin = next((other for other in range(rank) if list(places[other]) == list(place)), None)
        if not place[0]:
            problem = f"rank {rank} has no NVIDIA GPU with nccl"
        elif twin is not None:
            problem = f"ranks {twin} and {rank} share one GPU"
        if problem:
            break
    if backend == "nccl" and problem:
        raise SettingsError(
            f"backend 'nccl' needs a GPU of its own for every rank, and {problem}; use 'gloo', "
            "or start one process per GPU"
        )
    return backend or ("gloo" if problem else "nccl")


def _check_backend(backend: str | None) -> None:
    if not dist.is_available():
        raise SettingsError("this build of torch has no torch.distributed; install one that has")
    if backend not in (None, "gloo", "nccl"):
        raise SettingsError(f"backend must be 'gloo' or 'nccl', got {backend!r}")
    if not dist.is_gloo_available():
        raise SettingsError("backend 'gloo' is not in this build of torch; install one that has it")
    if backend == "nccl" and not (torch.cuda.is_available() and dist.is_nccl_available()):
        raise SettingsError(
            "backend 'nccl' needs an NVIDIA GPU and a CUDA build of torch; use 'gloo' on a CPU"
        )


def compare(group: Group, target: Any, model: Any = None) -> None:
    """Refuse to decode unless every rank holds the same.

    Args:
        group: from ``start``.
        target: an inner target.
        model: the torch module behind it, whose parameters are compared; None takes ``target.model``.

    Raises:
        SettingsError: on every rank, naming the rank that differs and in what.
    """
    model = model if model is not None else getattr(target, "model", None)
    _refuse_split_models(model)
    facts = fingerprint(target, model)
    if group.rank:
        link = group.links[0]
        link.send(Kind.HELLO, 0, facts)
        kind, _, numbers = link.receive()
        if kind is Kind.STOP:
            raise SystemExit(0)  # rank 0 had nothing to decode
        if kind is not Kind.VERDICT:
            raise RankError(0, f"rank 0 sent {kind.name} where its verdict was due; start all ranks alike")
        verdict = unpack_text(numbers)
    else:
        verdict = ""
        for rank, link in group.links.items():
            _, _, theirs = link.receive()
            differ = [name for name, a, b in zip(_FACTS, facts, theirs, strict=True) if a != b]
            # Other facts tell more than a checksum that differs because of them.
            if differ and not verdict:
                names = ", ".join(differ[1:] or differ)
                verdict = (
                    f"every rank must hold the same model on the same kind of device, and rank {rank} "
                    f"differs from rank 0 in: {names}; load the same files with the same settings"
                )
        for link in group.links.values():
            link.send(Kind.VERDICT, 0, pack_text(verdict))
        for link in group.links.values():
            link.flush()
    if verdict:
        raise SettingsError(verdict)


def dismiss(group: Group) -> None:
    """On rank 0, in place of a team: there is nothing to decode, the other ranks may leave."""
    for link in group.links.values():
        link.receive()
        link.send(Kind.STOP)
        link.flush()
    group.close()


def fingerprint(target: Any, model: Any) -> list[int]:
    """What two ranks must have in common, as numbers in the order of ``_FACTS``."""
    tensors = list(model.parameters()) if model is not None else []
    total = 0
    for number, tensor in enumerate(tensors):
        total = (total * 31 + _bits(tensor) * (number + 1)) % ((1 << 61) - 1)
    first = tensors[0] if tensors else torch.empty(0)
    return [
        total,
        sum(tensor.numel() for tensor in tensors),
        target.vocabulary,
        _stable(str(first.dtype)),
        _stable(first.device.type),
        _stable(type(target).__name__),
    ]


def _bits(tensor: torch.Tensor) -> int:
    """A checksum of a tensor's bits that one pass on its own device gives."""
    whole = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[tensor.element_size()]
    bits = tensor.detach().contiguous().view(-1).view(whole)
    halves = bits[: bits.numel() // 2].sum(dtype=torch.int64)
    return int(bits.sum(dtype=torch.int64)) * 3 + int(halves)


def _stable(text: str) -> int:
    """The same number for the same text in every process."""
    return zlib.crc32(text.encode())


def _refuse_split_models(model: Any) -> None:
    split = getattr(model, "tp_size", None) or getattr(model, "_tp_size", None) or 1
    for parameter in model.parameters() if isinstance(model, torch.nn.Module) else ():
        mesh = getattr(parameter, "device_mesh", None)  # a distributed tensor, whoever made it
        split = max(split, mesh.size() if mesh is not None else 1)
    if isinstance(split, int) and split > 1:
        raise SettingsError(
            f"lookahead parallelism needs the whole model on every rank, and this one is split over {split} "
            "ranks by tensor parallelism; use one or the other"
        )
