"""One model behind HTTP: its loading, its decoding thread, and its metrics."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path
from time import monotonic

from ..llm import LLM
from ..loading import load_with
from .api_errors import Refused
from .engine_thread import EngineThread
from .metrics import Metrics
from .prepare import Preparer
from .response_api import Conversations
from .settings import Settings

log = logging.getLogger("lookahead.server")


class Server:
    """One model behind HTTP.

    Args:
        settings: the server's settings.
        load: loads the model; None loads the model named in the settings.

    Attributes:
        loop: the thread that decodes.
        preparer: turns HTTP requests into engine requests; None until the model is ready.
        conversations: those that responses can continue.
        name: the model's name in the API.
        failed: called when the model cannot be loaded or the loop fails; by default, the former is logged.
        say: receives a line when the model is ready.
        address: the server's address, for that line.
    """

    def __init__(self, settings: Settings, load: Callable[[], LLM] | None = None) -> None:
        self.settings = settings
        self.metrics = Metrics()
        self.conversations = Conversations()
        self._load = load if load is not None else lambda: load_with(settings.loading())
        self.preparer: Preparer | None = None
        self.name = settings.served_model_name or ""
        self.failed: Callable[[], None] = self._log_failure
        self.say: Callable[[str], None] = lambda line: None
        self.address = ""
        self.loop = EngineThread(
            self._prepare, settings, self.metrics, lambda: self.failed(), self._say_ready
        )
        self._created = monotonic()

    def _prepare(self) -> tuple[LLM, int]:
        llm = self._load()
        self.name = self.name or Path(llm.name).name
        preparer = Preparer(llm, self.settings, self.name)
        preparer.warm_up()
        self.preparer = preparer
        return llm, preparer.max_tokens

    def _log_failure(self) -> None:
        if self.loop.engine is None:  # later errors are logged where they end the requests
            log.error("the model could not be loaded", exc_info=self.loop.error)

    def _say_ready(self) -> None:
        seconds = monotonic() - self._created
        self.say(f"listening on {self.address} after {seconds:.0f} s: {self.name}, {self.ready.llm.dtype}")

    @property
    def ready(self) -> Preparer:
        """The preparer of requests. The gate rejects requests until there is one."""
        assert self.preparer is not None
        return self.preparer

    def check_model(self, asked: str | None) -> None:
        """Reject a model that is not served.

        Raises:
            Refused: another model was requested, status 404.
        """
        names = [self.name] if self.settings.served_model_name else [self.name, self.ready.llm.name]
        if asked is not None and asked not in names:
            raise Refused(
                f"the model {asked!r:.200} is not served here; {self.name!r} is", 404, "model_not_found"
            )
