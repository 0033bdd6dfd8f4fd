"""A server of one's own: `serve-spec serve FILE` in a process beside this one."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import threading
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from typing import IO

from serve_spec.config import ConfigError

_READY = re.compile(r"^ready: (?:.* at )?(https?://\S+)")
_STOP_WITHIN_S = 120.0


def serve_command(file: str, port: int | None) -> list[str]:
    """The command that an operator would type."""
    chosen = [] if port is None else ["--port", str(port)]
    return [sys.executable, "-u", "-m", "serve_spec", "serve", file, *chosen]


@contextmanager
def own_server(command: Sequence[str], client_cores: int = 0) -> Iterator[str]:
    """The base URL that `command` announces; it is terminated, and waited for, at the end.

    What it prints goes to standard error.

    client_cores: the body runs on so many cores, and the server on all others; 0: no difference.

    Raises:
        ConfigError: it ended before it was ready, or would have no core.
    """
    cores = sorted(os.sched_getaffinity(0))
    kept = len(cores) - client_cores
    if kept < 1:
        raise ConfigError(f"client_cores={client_cores!r}: there are {len(cores)}; leave some")
    with _on(cores[:kept]):  # a child inherits them
        process = subprocess.Popen(
            command,
            stdout=subprocess.PIPE,
            text=True,
            start_new_session=True,  # Ctrl-C is ours to hand on, once
        )
    assert process.stdout is not None, "it was asked for"
    try:
        url = _ready_url(process.stdout)
        if url is None:
            raise ConfigError(
                f"command={' '.join(command)!r}: it ended with status {process.wait()} before "
                "it was ready; see what it printed"
            )
        # A full pipe would stop the server.
        threading.Thread(target=_pass_on, args=(process.stdout,), daemon=True).start()
        with _on(cores[kept:] or cores):
            yield url
    finally:
        _stop(process)


@contextmanager
def _on(cores: Collection[int]) -> Iterator[None]:
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, cores)
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)


def announced_url(line: str) -> str | None:
    """The URL in a line such as `ready: tiny at http://127.0.0.1:8000   (Ctrl-C stops it)`."""
    match = _READY.match(line)
    return None if match is None else match.group(1)


def _ready_url(output: IO[str]) -> str | None:
    for line in output:
        print(line, end="", file=sys.stderr)
        url = announced_url(line)
        if url is not None:
            return url
    return None


def _pass_on(output: IO[str]) -> None:
    with output:
        for line in output:
            print(line, end="", file=sys.stderr)


def _stop(process: subprocess.Popen[str]) -> None:
    if process.poll() is None:
        process.terminate()  # a shell's background jobs are born deaf to interrupts
    try:
        process.wait(_STOP_WITHIN_S)
    except subprocess.TimeoutExpired:
        process.kill()
