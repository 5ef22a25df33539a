"""Several replicas by Ray Serve, one process and one model each (the extra ``[ray]``).

    serve run lookahead.server.ray_app:build model=DIR max_replicas=4

Ray routes requests, streams through, replaces what dies, and adds replicas as requests queue up.
"""

from __future__ import annotations

from typing import Any

from ray import serve

from .app import create_app
from .settings import Settings


def build(arguments: dict[str, Any] | None = None) -> Any:
    """A Ray Serve application.

    Args:
        arguments: ``min_replicas`` and ``max_replicas`` (1 and 4), ``target_ongoing_requests`` of a replica (8),
            ``num_cpus``, ``num_gpus``, and settings of the server by name; what is not named
            is read from LOOKAHEAD_*.

    Raises:
        SettingsError: a setting that is not one, or that cannot be honoured.
    """
    given = dict(arguments or {})
    scaling = {
        name: kind(given.pop(name, default))
        for name, kind, default in (
            ("min_replicas", int, 1), ("max_replicas", int, 4), ("target_ongoing_requests", float, 8)
        )
    }  # fmt: skip
    resources = {name: float(given.pop(name)) for name in ("num_cpus", "num_gpus") if name in given}
    settings = Settings.read(given)
    # The application is made in each replica, and is there once its model is.
    replica = serve.deployment(
        name="lookahead",
        autoscaling_config=scaling,
        ray_actor_options=resources,
        max_ongoing_requests=settings.max_concurrent + settings.max_queue,
    )(serve.ingress(lambda: create_app(settings, wait=True))())
    return replica.bind()
