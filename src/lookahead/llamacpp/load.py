"""``load`` with ``engine="llama.cpp"``."""

from __future__ import annotations

from ..core import SettingsError
from ..options import LoadOptions
from .library import library

#: Options that cannot be used with llama.cpp, and why.
NOT_OF_LLAMA_CPP = {
    "dtype": "the file determines it",
    "weights": "the file determines it",
    "device": "n_gpu_layers sets the number of layers on the GPU",
    "device_map": "n_gpu_layers sets the number of layers on the GPU",
    "quantization_config": "the file determines it",
    "attention": "use flash_attn",
    "graph_memory": "llama.cpp captures its own graphs",
    "exact": "its rounding depends on the number of rows in a pass",
    "trust_remote_code": "a GGUF file contains no code",
    "parallel": "it decodes in one process",
    "parallel_timeout": "it decodes in one process",
}


def check_options(chosen: LoadOptions) -> None:
    """Reject options that llama.cpp does not support, and a missing installation, before anything is read."""
    given = [name for name in chosen.keywords() if name in NOT_OF_LLAMA_CPP]
    if given:
        raise SettingsError(
            f"{given[0]} cannot be used with engine='llama.cpp' ({NOT_OF_LLAMA_CPP[given[0]]}), got "
            f"{getattr(chosen, given[0])!r}; leave one of the two out"
        )
    library()
