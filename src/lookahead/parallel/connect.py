"""Start-up: torchrun's processes find each other and their devices, and check that they have the same model."""

from __future__ import annotations

import os
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist

from ..core import LookaheadError, SettingsError, Target
from ..core.errors import first_line
from ..hf.model import HFModel
from ..model import Model
from .wire import Link

#: Seconds of silence after which rank 0 considers another rank hung; the others end within twice that.
TIMEOUT = 120.0
#: Maximum numbers that ranks compare at once.
MAX_FACTS = 6


@dataclass(slots=True)
class Connections:
    """One process's connections to the other ranks.

    Attributes:
        rank: this process's rank; rank 0 decides and prints.
        size: R, the number of ranks.
        links: the links by rank: on rank 0 to every other rank, elsewhere to rank 0.
        backend: the backend for rows of logits: "gloo" or "nccl".
        timeout: seconds of silence after which a rank is considered hung.
        owns_process_group: whether ``start`` initialized torch.distributed, so that ``close`` shuts it down.
    """

    rank: int
    size: int
    links: dict[int, Link]
    backend: str
    timeout: float
    owns_process_group: bool = False

    def close(self) -> None:
        if self.owns_process_group and dist.is_initialized():
            dist.destroy_process_group()


def local_device(device: str | torch.device | None = None) -> str:
    """The device of this rank's model.

    "cuda" without an index means this rank's own GPU, by LOCAL_RANK. None means "cuda" if there is a GPU, else "cpu".
    Any other device is returned unchanged.

    Raises:
        SettingsError: this machine has fewer GPUs than ranks.
    """
    if device is None:
        device = "cuda" if torch.cuda.is_available() else "cpu"
    if str(device) != "cuda":
        return str(device)
    index = int(os.environ.get("LOCAL_RANK", "0"))
    count = torch.cuda.device_count()
    if index >= count:
        raise SettingsError(
            f"every rank needs its own GPU, and this machine has {count}, too few for local rank {index}; "
            f"start at most {count} processes per node, or use device 'cpu'"
        )
    return f"cuda:{index}"


def start(timeout: float = TIMEOUT, device: str | torch.device | None = None) -> Connections:
    """Connect to the other ranks. Call it once in every process.

    Rows of logits are sent over nccl if it is available and every rank has its own GPU, else over gloo.

    Args:
        timeout: seconds of silence after which a rank is considered hung.
        device: the device of this rank's model, as for ``local_device``.

    Raises:
        SettingsError: not started by torchrun, torch was built without gloo, or there are fewer GPUs than ranks.
        LookaheadError: not all ranks appeared in time.
    """
    if not 0 < timeout < float("inf"):
        raise SettingsError(f"the timeout must be a positive number of seconds, got {timeout}")
    if not dist.is_available() or not dist.is_gloo_available():
        raise SettingsError("this build of torch has no torch.distributed with gloo; install one that has")
    # The group of all ranks, unless the caller has initialized it.
    span = timedelta(seconds=timeout)
    owns = not dist.is_initialized()
    if owns:
        if "RANK" not in os.environ or "WORLD_SIZE" not in os.environ:
            what = "lookahead parallelism needs several processes, and this one was started alone"
            raise SettingsError(f"{what}; use torchrun --nproc-per-node R (2 or more) -m lookahead ...")
        try:
            dist.init_process_group("gloo", timeout=span)
        except (RuntimeError, ValueError) as error:
            what = f"the {os.environ['WORLD_SIZE']} ranks did not all appear within {timeout:g} s"
            raise LookaheadError(f"{what}: {first_line(error)}") from error
    # The backend for rows of logits: nccl if every rank has its own GPU.
    rank = dist.get_rank()
    size = dist.get_world_size()
    own_device = torch.device(local_device(device))
    if own_device.type == "cuda":
        torch.cuda.set_device(own_device)  # nccl uses the current device
    backend = _choose_backend(_gather(_device_id(own_device), timeout))
    rows = dist.new_group(backend="nccl", timeout=span) if backend == "nccl" else None
    # A link between rank 0 and every other rank. All ranks must create all groups, in the same order.
    links = {}
    for other in range(1, size):
        pair = dist.new_group([0, other], backend="gloo", timeout=span)
        if rank == 0:
            links[other] = Link(other, pair, timeout, rows)
        elif rank == other:
            # Twice as long, so that rank 0 detects a silent rank first and can still report it to this rank.
            links[0] = Link(0, pair, 2 * timeout, rows)
    return Connections(rank, size, links, backend, timeout, owns)


def _device_id(device: torch.device) -> list[int]:
    """Identifies a rank's device: [whether nccl could be used, checksum of the GPU's UUID]."""
    if device.type != "cuda":
        return [0, 0]
    uuid = str(torch.cuda.get_device_properties(device).uuid)
    return [int(dist.is_nccl_available()), zlib.crc32(uuid.encode())]


def _gather(numbers: list[int], timeout: float) -> list[list[int]]:
    """All ranks' numbers, by rank; at most ``MAX_FACTS`` each. Every rank must call this."""
    every = [torch.zeros(1 + MAX_FACTS, dtype=torch.int64) for _ in range(dist.get_world_size())]
    padded = [len(numbers), *numbers, *[0] * (MAX_FACTS - len(numbers))]
    try:
        dist.all_gather(every, torch.tensor(padded))
    except RuntimeError as error:
        raise LookaheadError(
            f"a rank ended, or did not load the model within {timeout:g} s; raise --parallel-timeout if it is slow "
            f"({first_line(error)})"
        ) from error
    return [numbers[1 : 1 + int(numbers[0])].tolist() for numbers in every]


def _choose_backend(devices: Sequence[Sequence[int]]) -> str:
    """The backend for rows of logits, from all ranks' ``_device_id``; the same result on every rank."""
    own_gpus = all(device[0] for device in devices) and len(set(map(tuple, devices))) == len(devices)
    return "nccl" if own_gpus else "gloo"


def check_same_model(connections: Connections, target: Target, model: Model) -> None:
    """Check that every rank has the same model on the same type of device. Arguments as in ``join``.

    Raises:
        SettingsError: a rank differs, or the model is split over ranks. Raised on every rank; the message names the
            rank and the differences.
        SystemExit: with status 0, if rank 0 has called ``dismiss``.
        LookaheadError: a rank ended, or did not load the model within the timeout.
    """
    if isinstance(model, HFModel):
        _refuse_split_models(model.module)
    facts = {
        "vocabulary": target.vocabulary,
        "parameters": model.parameter_count,
        "dtype": zlib.crc32(model.weights.encode()),
        "device type": zlib.crc32(model.device.partition(":")[0].encode()),
        "target": zlib.crc32(type(target).__name__.encode()),
        "model checksum": model.checksum(),
    }
    ours, *others = _gather(list(facts.values()), connections.timeout)
    if not ours:
        connections.close()
        raise SystemExit(0)  # rank 0 had nothing to decode
    for rank, theirs in enumerate(others, 1):
        differ = [name for name, a, b in zip(facts, ours, theirs, strict=True) if a != b]
        if differ:
            raise SettingsError(
                f"every rank must have the same model on the same type of device, and rank {rank} "
                f"differs from rank 0 in: {', '.join(differ)}; load the same files with the same settings"
            )


def dismiss(connections: Connections) -> None:
    """End the other ranks. Rank 0 calls this instead of ``join`` if there is nothing to decode."""
    _gather([], connections.timeout)
    connections.close()


def _refuse_split_models(model: torch.nn.Module) -> None:
    split = getattr(model, "tp_size", None) or 1
    for parameter in model.parameters():
        mesh = getattr(parameter, "device_mesh", None)  # of a distributed tensor
        split = max(split, mesh.size() if mesh is not None else 1)
    if split > 1:
        raise SettingsError(
            f"lookahead parallelism needs the whole model on every rank, and this one is split over {split} "
            "ranks by tensor parallelism; use one or the other"
        )
