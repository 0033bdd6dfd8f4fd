"""One logger set-up for the whole package: level, format, and the request a line is about.

`SERVE_SPEC_LOG_LEVEL`: least level, default WARNING. `SERVE_SPEC_LOG_FORMAT`: `text` (default), or
`json` for one object per line, whatever an exception has to say included.
"""

import json
import logging
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

TRACE_ID: ContextVar[str] = ContextVar("trace_id", default="-")
"""The x-request-id of the request that this task serves; on every line of its logs."""

_FORMAT = "%(levelname).1s %(asctime)s %(name)s [%(trace_id)s]: %(message)s"


class JSONFormatter(logging.Formatter):
    """One line per record, so that whatever collects logs never has to guess where one ends."""

    def format(self, record: logging.LogRecord) -> str:
        """The record as a JSON object; `error` holds a traceback, where there is one."""
        fields = {
            "time": self.formatTime(record, "%Y-%m-%dT%H:%M:%S") + f".{int(record.msecs):03d}",
            "level": record.levelname,
            "logger": record.name,
            "x_request_id": getattr(record, "trace_id", "-"),
            "message": record.getMessage(),
        }
        if record.exc_info:
            fields["error"] = self.formatException(record.exc_info)
        return json.dumps(fields)


def get_logger(name: str) -> logging.Logger:
    """The logger of one module."""
    root = logging.getLogger("serve_spec")
    if not root.handlers:
        root.addHandler(_handler())
        root.setLevel(os.environ.get("SERVE_SPEC_LOG_LEVEL", "WARNING").upper())
        root.propagate = False
    return logging.getLogger(name if name.startswith("serve_spec") else f"serve_spec.{name}")


@contextmanager
def stage(name: str) -> Iterator[None]:
    """Report that a part of the start begins, and how long it took.

    The logger serve_spec.progress is silent (level INFO) unless a server turns it on.
    """
    progress = get_logger("serve_spec.progress")
    progress.info("%s ...", name)
    began = time.monotonic()
    yield
    progress.info("%s: done in %.1f s", name, time.monotonic() - began)


def _handler() -> logging.Handler:
    handler = logging.StreamHandler()
    as_json = os.environ.get("SERVE_SPEC_LOG_FORMAT", "text").lower() == "json"
    text = logging.Formatter(_FORMAT, datefmt="%H:%M:%S")
    handler.setFormatter(JSONFormatter() if as_json else text)
    handler.addFilter(_note_request)
    return handler


def _note_request(record: logging.LogRecord) -> bool:
    record.trace_id = TRACE_ID.get()
    return True
