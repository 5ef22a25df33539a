"""Helpers for passes on a CUDA device: non-blocking copies, a single stream, and a check for synchronization.

On a CPU, copies are ordinary and streams are no-ops, so the same code runs there.
"""

from __future__ import annotations

import threading
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

#: torch's warning about an operation that waits for the device.
WAITS = "called a synchronizing CUDA operation"


def is_gpu(device: torch.device) -> bool:
    """Whether a device has streams and graphs; tests replace this function to treat the CPU as such a device."""
    return device.type == "cuda"


def pinned(numbers: Any, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Numbers as a tensor in pinned host memory, for non-blocking copies to the device.

    The tensor may be dropped immediately, because torch reuses pinned memory only after copies from it have ended.
    """
    tensor = torch.as_tensor(numbers, dtype=dtype)
    return tensor.pin_memory() if is_gpu(device) else tensor


def to_device(numbers: Any, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Numbers from the host, as a tensor on the device. The host does not wait for the copy."""
    return pinned(numbers, dtype, device).to(device, non_blocking=True)


class HostCopy:
    """A tensor being copied to the host. Work queued on the current stream later does not delay the copy."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self._event: Any = None
        if is_gpu(tensor.device):
            self._copy = torch.empty_like(tensor, device="cpu").pin_memory()
            self._copy.copy_(tensor, non_blocking=True)
            self._event = torch.cuda.Event()  # type: ignore[no-untyped-call]
            self._event.record()
        else:
            self._copy = tensor

    def numpy(self) -> Any:
        """The copy as an array. Waits until it is complete."""
        if self._event is not None:
            self._event.synchronize()
            self._event = None
        return self._copy.numpy()


class DeviceStream:
    """One stream for all work on some device memory, regardless of its callers' streams.

    Work in ``use`` runs after everything that the caller has launched and before everything that it launches later.
    So the work of several callers never overlaps on the device, each can read the results on its own stream, and the
    memory may be freed and reused in ``use``.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.cuda: Any = torch.cuda.Stream(device) if is_gpu(device) else None  # type: ignore[no-untyped-call]

    @contextmanager
    def use(self) -> Iterator[None]:
        """A context in which the device is current and work is queued on the stream."""
        if self.cuda is None:
            yield
            return
        with torch.cuda.device(self.device):
            caller = torch.cuda.current_stream()
            if caller == self.cuda:
                yield
                return
            self.cuda.wait_stream(caller)
            try:
                with torch.cuda.stream(self.cuda):
                    yield
            finally:
                caller.wait_stream(self.cuda)


_noticing = threading.Lock()


@contextmanager
def noticed_waits(device: torch.device) -> Iterator[list[str]]:
    """A context that collects this thread's operations that wait for the device, which a graph cannot contain.

    torch can report such operations as errors or as warnings, but only for the whole process. Errors would also occur
    in other threads, so warnings are used, and those of other threads are dropped.

    Yields:
        file and line of each operation, complete at the end of the block.
    """
    found: list[str] = []
    if not is_gpu(device):
        yield found
        return
    thread = threading.get_ident()
    show = warnings.showwarning

    def notice(message: Any, category: Any, filename: str, lineno: int, *others: Any, **named: Any) -> None:
        if WAITS not in str(message):
            show(message, category, filename, lineno, *others, **named)
        elif threading.get_ident() == thread:
            found.append(f"{filename}:{lineno}")

    with _noticing, warnings.catch_warnings():
        warnings.filterwarnings("always", WAITS)
        warnings.showwarning = notice
        before = torch.cuda.get_sync_debug_mode()
        torch.cuda.set_sync_debug_mode("warn")
        try:
            yield found
        finally:
            torch.cuda.set_sync_debug_mode(before)


def memory(device: torch.device) -> tuple[float, float]:
    """Free and total device memory, in bytes; infinite on a CPU."""
    return torch.cuda.mem_get_info(device) if is_gpu(device) else (float("inf"), float("inf"))
