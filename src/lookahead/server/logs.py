"""The log: one JSON object per line on stderr, without the text of prompts and completions."""

from __future__ import annotations

import json
import logging
import traceback
from time import time

log = logging.getLogger("lookahead.server")


class JsonLines(logging.Formatter):
    """One JSON object per line: time, level, event, and the fields of the record."""

    def format(self, record: logging.LogRecord) -> str:
        line = {"time": round(time(), 3), "level": record.levelname.lower(), "event": record.getMessage()}
        line |= getattr(record, "record", {})
        if record.exc_info:  # of loading, before any request
            line["traceback"] = self.formatException(record.exc_info)
        return json.dumps(line)


def log_to_stderr() -> None:
    """Write the log lines of this server, uvicorn and asyncio, and Python's warnings, as JSON to stderr."""
    handler = logging.StreamHandler()
    handler.setFormatter(JsonLines())
    logging.captureWarnings(True)
    others = [(name, logging.WARNING) for name in ("uvicorn", "asyncio", "py.warnings")]
    for name, level in (("lookahead.server", logging.INFO), *others):
        logger = logging.getLogger(name)
        logger.handlers = [handler]
        logger.propagate = False
        logger.setLevel(level)


def log_failure(event: str, error: BaseException, with_text: bool) -> None:
    """Log where an exception was raised.

    Args:
        event: what failed.
        error: the exception.
        with_text: whether to log its message too, which may quote a prompt or a completion (--log-text).
    """
    chain = list[BaseException]()
    each: BaseException | None = error
    while each is not None and each not in chain:
        chain.append(each)
        each = each.__cause__ or each.__context__
    frames = [line for each in reversed(chain) for line in traceback.format_tb(each.__traceback__)]
    record = {"error": type(error).__name__, "traceback": "".join(frames)}
    log.error(event, extra={"record": record | ({"message": str(error)} if with_text else {})})
