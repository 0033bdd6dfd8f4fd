"""The process of an engine on this host, outside Ray: started by `start_engine`.

Run as a program it takes its configuration, pickled, from standard input, and the file descriptors
of its two connections as arguments: one for an `EngineClient`, one for what its start raises.
"""

from __future__ import annotations

import os
import pickle
import subprocess
import sys
import traceback
from contextlib import suppress
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from pathlib import Path

import serve_spec
from serve_spec.config import ServeSpecConfig
from serve_spec.engine.client import EngineClient

_END_S = 30.0
"""Most seconds to wait for a process that was told to end."""


class EngineProcess(EngineClient):
    """The client of an engine in a child process; its shutdown ends the process."""

    def __init__(
        self, config: ServeSpecConfig, connection: Connection, process: subprocess.Popen[bytes]
    ) -> None:
        super().__init__(config, connection)
        self.pid = process.pid
        self._process = process

    def shutdown(self) -> None:
        """See `EngineClient`."""
        super().shutdown()
        end(self._process)


def start_engine(config: ServeSpecConfig) -> EngineProcess:
    """Start an engine in a process of its own; return when it is ready.

    Raises what building the engine raised there, RuntimeError if the process ended otherwise.
    """
    mine, theirs = Pipe()
    failure, report = Pipe(duplex=False)
    paths = [str(Path(serve_spec.__file__).parents[1]), os.environ.get("PYTHONPATH", "")]
    ends = theirs.fileno(), report.fileno()
    process = subprocess.Popen(
        # -P: no module of the current folder replaces one of a library.
        [sys.executable, "-P", "-m", "serve_spec.engine.process", *map(str, ends)],
        stdin=subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, paths))},
        pass_fds=ends,
        start_new_session=True,  # an interrupt at the terminal is for this process
    )
    theirs.close()
    report.close()
    assert process.stdin is not None
    try:
        with suppress(BrokenPipeError), process.stdin as stdin:
            stdin.write(pickle.dumps(config))
        return EngineProcess(config, mine, process)
    except EOFError:
        raise _reason(failure, process) from None
    except BaseException:
        end(process, within_s=0.0)
        raise
    finally:
        failure.close()


def end(process: subprocess.Popen[bytes], within_s: float = _END_S) -> None:
    """Wait until a process has ended, and kill it if that takes too long."""
    try:
        process.wait(within_s)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def _reason(failure: Connection, process: subprocess.Popen[bytes]) -> Exception:
    """Return what the start of an engine raised."""
    with suppress(EOFError):
        error = failure.recv()
        end(process)
        assert isinstance(error, Exception), "the process sends what it catches"
        return error
    end(process)
    return RuntimeError(f"the engine's process ended with exit code {process.returncode}")


def run(connection: Connection, report: Connection) -> None:
    """Build the engine and run it until its client ends or stops it."""
    # Imported here because a client does not need torch.
    from serve_spec.engine.build import build_engine
    from serve_spec.engine.server import EngineServer

    config: ServeSpecConfig = pickle.load(sys.stdin.buffer)
    try:
        engine = build_engine(config)
    except Exception as error:
        traceback.print_exc()
        _send(report, error)
        raise SystemExit(1) from None
    report.close()
    EngineServer(config, engine, connection, on_lost=lambda: os._exit(1)).run()


def _send(report: Connection, error: Exception) -> None:
    try:
        report.send(error)
    except Exception:  # it cannot be pickled
        report.send(RuntimeError(f"{type(error).__name__}: {error}"))


if __name__ == "__main__":
    run(*(Connection(int(end_)) for end_ in sys.argv[1:3]))
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)  # skip exit handlers of libraries, some of which wait for lost ranks
