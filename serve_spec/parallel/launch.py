"""Followers as processes of this host."""

from __future__ import annotations

import os
import pickle
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import serve_spec
from serve_spec.parallel.followers import Followers


def launch(module: str, size: int, settings: object) -> Followers:
    """Starts ranks 1 .. size - 1, each as `python -m module`; returns when all have called.

    A rank finds (settings, rank, size, address), pickled, at its standard input.

    Raises:
        RankLost: one did not start.
    """
    followers = Followers(size)
    try:
        followers.accept(
            {
                rank: _start(module, (settings, rank, size, followers.address))
                for rank in range(1, size)
            }
        )
    except BaseException:
        followers.stop()
        raise
    return followers


def _start(module: str, arguments: object) -> subprocess.Popen[bytes]:
    package = str(Path(serve_spec.__file__).parents[1])
    paths = [package, *filter(None, [os.environ.get("PYTHONPATH")])]
    process = subprocess.Popen(
        # -P: no module of the current folder takes the place of a library's.
        [sys.executable, "-P", "-m", module],
        stdin=subprocess.PIPE,
        # Progress is rank 0's to show.
        env={**os.environ, "PYTHONPATH": os.pathsep.join(paths), "TQDM_DISABLE": "1"},
        start_new_session=True,  # an interrupt at the terminal is rank 0's to answer
    )
    assert process.stdin is not None
    with suppress(BrokenPipeError), process.stdin as stdin:
        stdin.write(pickle.dumps(arguments))
    return process
