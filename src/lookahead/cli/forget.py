"""``lookahead forget``: remove the answers that --remember has kept."""

from __future__ import annotations

import json

import typer

from .console import note
from .shared import Json


def forget(as_json: Json = False) -> None:
    """Remove all answers that --remember has kept on this machine, and the tables counted from them.

    Running servers and chats no longer use them from their next request on.
    """
    from ..drafters.adaptive import remembered

    files = remembered.forget()
    if as_json:
        typer.echo(json.dumps({"removed": [*map(str, files)]}))
    else:
        note(f"removed {len(files)} files from {remembered.folder()}" if files else "nothing was remembered")
