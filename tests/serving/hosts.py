"""Two hosts made of network namespaces, with a cable between them."""

import ctypes
import os
import subprocess
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest

HOSTS = {f"ss-{end}-{os.getpid()}": f"10.77.0.{end}" for end in (1, 2)}
_CLONE_NEWNET = 0x40000000


def ip(*arguments):
    return subprocess.run(["ip", *arguments], check=True, capture_output=True, text=True)


def on_host(name, *command):
    """The command that runs a command on a host."""
    return ["ip", "netns", "exec", name, *command]


def unplug(name):
    """Pull the cable out of a host: nothing is closed, nothing arrives."""
    ip("-n", name, "link", "set", "eth", "down")


@contextmanager
def two_hosts():
    """The names of two hosts that reach each other and nothing else."""
    one, other = HOSTS
    with ExitStack() as stack:
        try:
            for name in HOSTS:
                ip("netns", "add", name)
                stack.callback(ip, "netns", "del", name)
            cable = ("type", "veth", "peer", "name", "eth", "netns", other)
            ip("link", "add", "eth", "netns", one, *cable)
        except (OSError, subprocess.CalledProcessError) as error:
            pytest.skip(f"no network namespaces here: {getattr(error, 'stderr', error)}")
        for name, address in HOSTS.items():
            ip("-n", name, "addr", "add", f"{address}/24", "dev", "eth")
            ip("-n", name, "link", "set", "lo", "up")
            ip("-n", name, "link", "set", "eth", "up")
        yield one, other


@contextmanager
def entered(name):
    """This thread, and what it starts, is on that host."""
    own = os.open("/proc/thread-self/ns/net", os.O_RDONLY)
    there = os.open(Path("/run/netns", name), os.O_RDONLY)
    try:
        _set_namespace(there)
        yield
    finally:
        _set_namespace(own)
        os.close(own)
        os.close(there)


def _set_namespace(descriptor):
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.setns(descriptor, _CLONE_NEWNET):
        raise OSError(ctypes.get_errno(), "setns")
