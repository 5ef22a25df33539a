"""The device of a model, tried before anything is read. Without torch, that is the CPU."""

from __future__ import annotations

import os
import warnings
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

from ..core import SettingsError
from ..core.errors import first_line

if TYPE_CHECKING:
    import torch

#: How to install what this package needs.
INSTALL = "pip install 'lookahead-decoding[transformers]'"


def require_transformers(what: str) -> None:
    """Raise SettingsError, whose message begins with ``what``, unless torch and transformers are installed."""
    absent = [name for name in ("torch", "transformers") if find_spec(name) is None]
    if absent:
        raise SettingsError(
            f"{what} needs torch and transformers, but {' and '.join(absent)} cannot be found; {INSTALL}"
        )


def find_device(device: str | torch.device | None) -> str:
    """The requested device, or else a GPU if torch can use it, or else the CPU, in torch's notation.

    Raises:
        SettingsError: torch cannot use the requested device.
    """
    if str(device) == "cpu" or (device is None and not _torch_has_gpu_code()):
        return "cpu"
    require_transformers(f"device={str(device)!r}")
    import torch

    # Count the GPUs, and warn if torch rejects the GPU, for example because of an old driver.
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    why = str(caught[0].message).split(". ")[0] if caught and not count else ""

    # Try the device. A kernel has to run, because this build of torch may lack kernels for the card.
    asked = str(device or ("cuda" if count else "cpu"))
    try:
        torch.zeros(1, device=torch.device(asked)).add_(1)
    except (RuntimeError, AssertionError, NotImplementedError) as error:
        if device is not None:
            known = f"cpu, cuda:0 to cuda:{count - 1}" if count > 1 else "cpu, cuda" if count else "cpu"
            visible = os.environ.get("CUDA_VISIBLE_DEVICES")
            hidden = "" if visible is None else f"; CUDA_VISIBLE_DEVICES is {visible!r}"
            raise SettingsError(
                f"device must be one that torch can use here ({known}), got {asked!r} ({first_line(error)}{hidden})"
            ) from None
        why = first_line(error)
        asked = "cpu"
    if device is None and why:
        warnings.warn(
            f"the GPU cannot be used, so the model runs on the CPU ({why})",
            RuntimeWarning,
            stacklevel=4,
        )
    return str(torch.device(asked))


def gpus() -> list[str]:
    """The GPUs that torch can use, with their memory. torch is imported only if its build has GPU code."""
    if not _torch_has_gpu_code():
        return []
    import torch

    found = [torch.cuda.get_device_properties(index) for index in range(torch.cuda.device_count())]
    return [f"{gpu.name} ({gpu.total_memory / 2**30:.0f} GiB)" for gpu in found]


def _torch_has_gpu_code() -> bool:
    """Whether this build of torch includes CUDA or ROCm, without importing torch, which takes a second."""
    package = find_spec("torch")
    places = package.submodule_search_locations if package is not None else None
    names = ("*torch_cuda*", "*torch_hip*")
    return any(next(Path(place, "lib").glob(name), None) for place in places or () for name in names)
