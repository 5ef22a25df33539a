"""A CUDA device simulated on the CPU: streams, graphs, memory, blocking operations, and a log of calls.

``FakeCuda(monkeypatch)`` replaces the parts of ``torch.cuda`` that ``lookahead.hf`` calls. Tensors stay
on the CPU and are computed at once, so results are correct; the log shows the order in which a device would
have received the work. A graph records its capture's operations with their tensors and a replay runs them
again, so decisions that Python made during the capture stay fixed, as on a device.
"""

import warnings
from contextlib import contextmanager, nullcontext
from types import SimpleNamespace

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from lookahead.hf import cuda, paths

TOTAL = 10**9


class Graph(TorchDispatchMode):
    """The operations of a capture, during which the host may not read values."""

    def __init__(self, device):
        super().__init__()
        self.device, self.calls = device, []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        assert "_local_scalar_dense" not in str(func)
        out = func(*args, **(kwargs or {}))
        self.calls.append((func, args, kwargs or {}, out))
        return out

    @torch.no_grad()
    def replay(self):
        self.device.note("replay")
        for func, args, kwargs, out in self.calls:
            again = func(*args, **kwargs)
            for old, new in zip(tree_leaves(out), tree_leaves(again), strict=True):
                if torch.is_tensor(old) and old.data_ptr() != new.data_ptr():  # neither a view nor in place
                    old.copy_(new)


class FakeCuda:
    """The simulated device.

    Attributes:
        log: (what, stream) in call order; for a wait, (what, waiting stream, awaited stream).
        current: the current stream; a test may set it to another caller's.
        free: free bytes out of ``TOTAL``.
        cost: bytes that a capture allocates; it runs out of memory above ``free``.
        errors: what running out of memory raises in a capture; the second one, if any, at its end.
        mode: the sync-debug mode.
    """

    def __init__(self, monkeypatch):
        self.log, self.streams, self.handles = [], 0, 0
        self.caller("caller")
        self.free, self.cost, self.mode = TOTAL, 1, 0
        self.errors = [torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 MiB")]
        replaced = {
            "Stream": lambda device: self.stream(),
            "Event": self.event,
            "device": lambda device: nullcontext(),
            "stream": self.on,
            "current_stream": lambda device=None: self.current,
            "CUDAGraph": lambda: Graph(self),
            "graph": self.capture,
            "graph_pool_handle": self.pool,
            "mem_get_info": lambda device=None: (self.free, TOTAL),
            "empty_cache": lambda: None,
            "get_sync_debug_mode": lambda: self.mode,
            "set_sync_debug_mode": lambda mode: setattr(self, "mode", mode),
        }
        for name, value in replaced.items():
            monkeypatch.setattr(torch.cuda, name, value)
        monkeypatch.setattr(torch.Tensor, "pin_memory", lambda tensor: tensor)
        monkeypatch.setattr(paths, "on_gpu", lambda model: True)
        # Patch every module that calls is_gpu.
        for module in ("cuda", "cuda_graphs", "graph_store"):
            monkeypatch.setattr(f"lookahead.hf.{module}.is_gpu", lambda device: True)

    def note(self, what, *others):
        self.log.append((what, self.current.name, *others))

    def stream(self):
        self.streams += 1
        made = SimpleNamespace(name=f"stream {self.streams}")
        made.wait_stream = lambda other: self.log.append(("wait", made.name, other.name))
        return made

    def caller(self, name):
        """Make a new stream of this name current."""
        self.current = self.stream()
        self.current.name = name

    def event(self):
        return SimpleNamespace(record=lambda: self.note("record"), synchronize=lambda: self.note("read"))

    @contextmanager
    def on(self, stream):
        before, self.current = self.current, stream
        try:
            yield
        finally:
            self.current = before

    @contextmanager
    def capture(self, graph, pool, stream, capture_error_mode):
        assert stream is self.current
        assert capture_error_mode == "thread_local"
        self.note("capture", pool)
        if self.cost > self.free:
            try:
                raise self.errors[0]
            finally:
                for error in self.errors[1:]:
                    raise error
        self.free -= self.cost
        with graph:
            yield

    def pool(self):
        self.handles += 1
        return self.handles

    def wait(self):
        """An operation that waits for the device."""
        if self.mode == "error":
            raise RuntimeError(cuda.WAITS)
        if self.mode == "warn":
            warnings.warn(cuda.WAITS, stacklevel=2)
