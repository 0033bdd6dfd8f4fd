"""Follow README.md and docs/quickstart.md as a new user: `python -m tools.newcomer [PAGE ...]`.

Each page gets an empty environment: a copy of the checkout, a virtual environment and a home. Its
blocks `sh` and `python` run in order, as they are written. Fails where a command fails, or prints
something else than the page says:

- Lines that begin with `#>` are what the command before them prints, or the block of Python;
  `...` stands for any text. Without such lines any output will do.
- A block that starts with ```sh no-run or ```python no-run is left out.
- `serve-spec serve` and `make serve` or `demo` run until the next of them, and are ready when they
  print a `curl` line.
"""

from __future__ import annotations

import argparse
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).parents[1]
PAGES = ("README.md", "docs/quickstart.md")

_COMMAND_WITHIN_S, _READY_WITHIN_S, _END_WITHIN_S = 1200.0, 300.0, 60.0
_POLL_S = 0.2
_OUTPUT = "#>"
_BLOCK = re.compile(r"^```(sh|python)\b(.*)\n((?:.*\n)*?)```$", re.MULTILINE)
_SERVER = re.compile(r"serve-spec serve |make (serve|demo)\b")
_READY = re.compile(r"^curl ", re.MULTILINE)
# Of the machine. All else that configures this user's Python, Ray or server is left out.
_KEPT = re.compile(r"(PATH|LANG|LC_\w+|TERM|TMPDIR|PIP_\w+|\w+_PROXY|SSL_\w+)$", re.IGNORECASE)
# Variables that one command sets, such as those of an activated environment, are kept for the next.
_SHELL = '. "$0"; eval "$1"; status=$?; declare -px > "$0"; exit $status'


class Command(NamedTuple):
    """What a page tells a user to run.

    line: its place in the page. output: what the page says it prints; None: nothing about it.
    """

    line: int
    language: str
    text: str
    output: str | None = None

    @property
    def is_server(self) -> bool:
        """Whether it runs until it is told to end."""
        return self.language == "sh" and _SERVER.match(self.text) is not None


class Difference(Exception):
    """A command does not do what its page says."""


def commands(page: str) -> list[Command]:
    """Return the commands of a page, without the blocks that are not to be run."""
    found: list[Command] = []
    for block in _BLOCK.finditer(page):
        language, options, body = block.groups()
        line = page[: block.start()].count("\n") + 2
        if "no-run" not in options.split():
            found += _commands_of_block(line, language, body)
    return found


def _commands_of_block(first_line: int, language: str, body: str) -> list[Command]:
    """Return each shell command of a block, or all of its Python as one."""
    found: list[Command] = []
    lines: list[str] = []
    output: list[str] = []

    def add() -> None:
        if lines:
            said = "\n".join(output) if output else None
            found.append(Command(start, language, "\n".join(lines), said))
            lines.clear()
            output.clear()

    start = first_line
    for number, line in enumerate(body.splitlines(), first_line):
        if line.startswith(_OUTPUT):
            output.append(line.removeprefix(_OUTPUT).removeprefix(" "))
            continue
        if language == "sh" and _is_complete("\n".join(lines)):
            add()
            start = number
            if line.strip() and not line.startswith("#"):
                lines.append(line)
        else:
            lines.append(line)
    add()
    return found


def _is_complete(text: str) -> bool:
    """Return whether a shell would run this without asking for more lines."""
    try:
        shlex.split(text, comments=True)
    except ValueError:  # an open quotation
        return False
    return not text.endswith("\\")


def is_as_said(printed: str, said: str) -> bool:
    """Return whether a command printed what its page says; `...` there is any text."""
    parts = map(re.escape, said.strip().split("..."))
    return re.fullmatch(".*".join(parts), printed.strip(), re.DOTALL) is not None


class Newcomer:
    """A new user with a fresh clone in `folder`, an empty home and an empty Python environment."""

    def __init__(self, folder: Path, python: str) -> None:
        self._clone, self._log = folder / "clone", folder / "log"
        self._state = folder / "state"
        self._script = folder / "block.py"
        self._server: subprocess.Popen[bytes] | None = None
        home, environment = folder / "home", folder / "python"
        home.mkdir()
        _copy_checkout(self._clone)
        subprocess.run([python, "-m", "venv", environment], check=True)
        kept = {name: value for name, value in os.environ.items() if _KEPT.match(name)}
        # Without the folder of the Python that runs this: its serve-spec is not the clone's.
        own = {str(Path(sys.executable).parent), str(Path(sys.prefix) / "bin")}
        paths = [path for path in os.get_exec_path() if path not in own]
        kept |= {"HOME": str(home), "PATH": os.pathsep.join([f"{environment}/bin", *paths])}
        self._environment = kept
        self._state.touch()

    def run(self, command: Command) -> None:
        """Do what the page says; raise Difference if it does not happen."""
        if command.is_server:
            self.stop_server()
            self._serve(command)
            return
        text = command.text
        if command.language == "python":
            self._script.write_text(text)
            text = f"python {shlex.quote(str(self._script))}"
        with self._log.open("wb") as errors:
            process = self._start(text, subprocess.PIPE, errors)
            try:
                printed = process.communicate(timeout=_COMMAND_WITHIN_S)[0].decode()
            except subprocess.TimeoutExpired as error:
                os.killpg(process.pid, signal.SIGKILL)
                raise Difference(f"not over after {_COMMAND_WITHIN_S:.0f} s") from error
        if process.returncode:
            raise Difference(f"status {process.returncode}:\n{printed}{self._log.read_text()}")
        if command.output is not None and not is_as_said(printed, command.output):
            raise Difference(f"printed\n{printed}\ninstead of\n{command.output}")

    def stop_server(self) -> None:
        """Press Ctrl-C in the terminal of the server, if one runs."""
        server, self._server = self._server, None
        if server is None:
            return
        with suppress(ProcessLookupError):
            os.killpg(server.pid, signal.SIGINT)
        try:
            server.wait(_END_WITHIN_S)
        except subprocess.TimeoutExpired as error:
            os.killpg(server.pid, signal.SIGKILL)
            raise Difference(f"the server runs on {_END_WITHIN_S:.0f} s after Ctrl-C") from error

    def _serve(self, command: Command) -> None:
        """Start a server and wait until it is ready."""
        log = self._log.with_name("server")
        with log.open("wb") as output:
            self._server = self._start(command.text, output, output)
        deadline = time.monotonic() + _READY_WITHIN_S
        while not _READY.search(log.read_text()):
            if self._server.poll() is not None or time.monotonic() > deadline:
                raise Difference(f"the server is not ready:\n{log.read_text()}")
            time.sleep(_POLL_S)
        if command.output is not None and not is_as_said(log.read_text(), command.output):
            raise Difference(f"printed\n{log.read_text()}\ninstead of\n{command.output}")

    def _start(self, text: str, output: Any, errors: Any) -> subprocess.Popen[bytes]:
        return subprocess.Popen(
            ["bash", "-c", _SHELL, str(self._state), text],
            cwd=self._clone,
            env=self._environment,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=errors,
            start_new_session=True,
        )


def _copy_checkout(clone: Path) -> None:
    """Copy the files that git knows or would add, as they are."""
    listed = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    names = subprocess.run(listed, cwd=ROOT, check=True, capture_output=True, text=True).stdout
    for name in filter(None, names.split("\0")):
        if (ROOT / name).is_file():
            (clone / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, clone / name)


@contextmanager
def newcomer(python: str) -> Iterator[Newcomer]:
    """Return a new user, whose files and server are removed at the end."""
    # Short, because Ray's socket paths are limited.
    with tempfile.TemporaryDirectory(prefix="new-") as folder:
        user = Newcomer(Path(folder), python)
        try:
            yield user
        finally:
            user.stop_server()


def follow(page: str, python: str) -> bool:
    """Run the commands of a page and print each with its time; return whether all did as said."""
    line = 0
    try:
        with newcomer(python) as user:
            for command in commands((ROOT / page).read_text()):
                line, began_s = command.line, time.monotonic()
                user.run(command)
                took_s, first = time.monotonic() - began_s, command.text.splitlines()[0]
                print(f"{page}:{line}: {took_s:5.1f} s  {first}", flush=True)
    except Difference as error:
        print(f"{page}:{line}: {error}", file=sys.stderr)
        return False
    return True


def main() -> None:
    """Follow all pages; exit with 1 if one is wrong."""
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=raw)
    parser.add_argument("pages", nargs="*", default=PAGES, metavar="PAGE")
    parser.add_argument("--python", default=sys.executable, help="of the new environments")
    args = parser.parse_args()
    results = [follow(page, args.python) for page in args.pages]
    sys.exit(0 if all(results) else 1)


if __name__ == "__main__":
    main()
