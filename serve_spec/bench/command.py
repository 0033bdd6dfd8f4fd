"""`serve-spec bench NAME`: one measurement."""

from __future__ import annotations

import sys

from serve_spec.bench import offline, trace
from serve_spec.bench.adaptive import command as adaptive
from serve_spec.bench.online import command as online

_BENCHES = {
    "adaptive": adaptive.main,
    "offline": offline.main,
    "online": online.main,
    "trace": trace.main,
}


def main(argv: list[str]) -> int:
    """Runs one benchmark; the process exit status."""
    if not argv or argv[0] not in _BENCHES:
        print(f"usage: serve-spec bench {{{','.join(_BENCHES)}}} [ARGUMENTS]", file=sys.stderr)
        return 2
    return _BENCHES[argv[0]](argv[1:])
