"""Where files are kept for the next start."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path


def cache_folder() -> Path:
    """Return `$SERVE_SPEC_CACHE`, by default ~/.cache/serve_spec; it may not exist yet."""
    try:
        return Path(os.environ.get("SERVE_SPEC_CACHE") or "~/.cache/serve_spec").expanduser()
    except RuntimeError:  # a user without a home
        return Path(tempfile.gettempdir()) / "serve_spec"
