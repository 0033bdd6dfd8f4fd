"""A process beside this one that does what it is asked, one thing at a time.

What fails, crashes or hangs there ends there, and whoever asked goes on.
"""

from __future__ import annotations

import multiprocessing
import os
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from contextlib import closing, suppress
from multiprocessing.connection import Connection
from types import TracebackType
from typing import Any, Concatenate, Generic, ParamSpec, Protocol, Self, TypeVar


class Subject(Protocol):
    """What lives in the other process."""

    def close(self) -> None:
        """Gives back whatever it holds."""
        ...


S = TypeVar("S", bound=Subject)
P = ParamSpec("P")
T = TypeVar("T")

_END_S = 30.0
"""Seconds that a process gets to end by itself."""
_REST_S = 11.0
"""Seconds after a kill until the ranks that the process had started are gone, too."""


class AsideFailed(Exception):
    """No answer came, or an error instead of it."""


class Aside(Generic[S]):
    """Starts at once; a context that ends it. Nothing is to be asked of it after it failed.

    make: makes the subject, there. limit_s: seconds that may be spent waiting for answers, in all.
    """

    def __init__(self, make: Callable[[], S], limit_s: float) -> None:
        # A fork would share the state of threads and of a GPU.
        context = multiprocessing.get_context("spawn")
        self._line, theirs = context.Pipe()
        self._folder = tempfile.TemporaryDirectory(ignore_cleanup_errors=True)
        arguments = theirs, make, self._folder.name
        self._process = context.Process(target=_serve, args=arguments, daemon=True)
        self._process.start()
        theirs.close()
        self._limit_s = limit_s
        self._left_s = limit_s

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def ask(self, work: Callable[Concatenate[S, P], T], *args: P.args, **kwargs: P.kwargs) -> T:
        """What `work`, a function of a module, gives there for the subject and the arguments.

        Raises:
            AsideFailed: it raised, or the process ended or took too long and was ended.
        """
        started = time.monotonic()
        try:
            self._line.send((work, args, kwargs))
            if not self._line.poll(max(0.0, self._left_s)):
                self._kill()
                raise AsideFailed(f"no answer within limit_s={self._limit_s:g}; ended")
            is_done, answer = self._line.recv()
        except (EOFError, OSError) as error:
            self._process.join(_END_S)
            code = self._process.exitcode
            raise AsideFailed(f"its process ended with exit code {code}") from error
        finally:
            self._left_s -= time.monotonic() - started
        if not is_done:
            raise AsideFailed(answer)
        return answer  # type: ignore[no-any-return]

    def dismiss(self) -> None:
        """Lets the process end by itself."""
        self._line.close()

    def close(self) -> None:
        """Ends the process. Safe to call again."""
        self.dismiss()
        self._process.join(_END_S)
        if self._process.is_alive():
            self._kill()
        self._folder.cleanup()

    def _kill(self) -> None:
        self._process.kill()
        self._process.join()
        time.sleep(_REST_S)


def _serve(line: Connection[Any, Any], make: Callable[[], Subject], folder: str) -> None:
    """The other process: answers until nobody asks any more."""
    tempfile.tempdir = folder  # what it leaves there goes, however it ends
    with suppress(EOFError), closing(make()) as subject:
        while True:
            work, args, kwargs = line.recv()
            line.send(_outcome(work, subject, args, kwargs))
    sys.stderr.flush()
    # Without the farewells of libraries, some of which wait for ranks that are gone.
    os._exit(0)


def _outcome(
    work: Callable[..., object], subject: Subject, args: Any, kwargs: Any
) -> tuple[bool, object]:
    try:
        return True, work(subject, *args, **kwargs)
    except Exception as error:
        traceback.print_exc()
        return False, f"{type(error).__name__}: {error}"
