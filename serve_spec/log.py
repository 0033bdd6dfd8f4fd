"""One logger set-up for the whole package: level, time, replica in the prefix."""

import logging
import os

_FORMAT = "%(levelname).1s %(asctime)s %(name)s: %(message)s"


def get_logger(name: str) -> logging.Logger:
    """The logger of one module; level from `SERVE_SPEC_LOG_LEVEL` (default WARNING)."""
    root = logging.getLogger("serve_spec")
    if not root.handlers:
        handler = logging.StreamHandler()
        handler.setFormatter(logging.Formatter(_FORMAT, datefmt="%H:%M:%S"))
        root.addHandler(handler)
        root.setLevel(os.environ.get("SERVE_SPEC_LOG_LEVEL", "WARNING").upper())
        root.propagate = False
    return logging.getLogger(name if name.startswith("serve_spec") else f"serve_spec.{name}")
