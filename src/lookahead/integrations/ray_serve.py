"""Several replicas with Ray Serve, each with its own process and model (the extra ``[ray]``).

    serve run lookahead.integrations.ray_serve:build model=DIR max_replicas=4

Ray routes requests, passes streams through, restarts dead replicas, and adds replicas while requests queue up.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from ray import serve

from ..core import SettingsError
from ..server.app import create_app
from ..server.settings import Settings


def build(arguments: dict[str, Any] | None = None) -> Any:
    """A Ray Serve application.

    Args:
        arguments: ``min_replicas`` and ``max_replicas`` (1 and 4), ``target_ongoing_requests`` of a replica (8),
            ``num_cpus``, ``num_gpus``, and server settings by name. Other settings are read from LOOKAHEAD_*.

    Raises:
        SettingsError: an unknown setting, or an invalid value.
    """
    given = dict(arguments or {})
    unused = sorted({"host", "port", "shutdown_timeout"} & given.keys())
    if unused:
        raise SettingsError(
            f"{unused[0]} has no effect in Ray Serve, whose proxy listens; configure Ray instead"
        )
    scaling = {
        name: _number(name, kind, given.pop(name, default))
        for name, kind, default in (
            ("min_replicas", int, 1),
            ("max_replicas", int, 4),
            ("target_ongoing_requests", float, 8),
        )
    }
    resources = {
        name: _number(name, float, given.pop(name)) for name in ("num_cpus", "num_gpus") if name in given
    }
    settings = replace(Settings.read(given), host="0.0.0.0")  # Ray's proxy listens, under any name
    # Each replica creates its own application, which is ready once its model is.
    replica = serve.deployment(
        name="lookahead",
        autoscaling_config=scaling,
        ray_actor_options=resources,
        max_ongoing_requests=settings.max_concurrent + settings.max_queue,
    )(serve.ingress(lambda: create_app(settings, wait=True))())
    return replica.bind()


def _number(name: str, kind: type[int] | type[float], given: Any) -> float:
    try:
        return kind(given)
    except (TypeError, ValueError, OverflowError):
        raise SettingsError(f"{name} must be a number, got {given!r}") from None
