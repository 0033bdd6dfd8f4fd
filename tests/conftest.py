"""What every test shares: one thread, a cache of its own, no clock that could fail a test."""

import asyncio
import atexit
import inspect
import os
import shutil
import sys
import tempfile

import pytest
from hypothesis import settings

# The cores are few and shared. Before torch is imported anywhere; child processes inherit it.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

# Costs that engines measure under test are not kept.
_cache = tempfile.mkdtemp(prefix="serve-spec-test-cache-")
os.environ["SERVE_SPEC_CACHE"] = _cache
atexit.register(shutil.rmtree, _cache, ignore_errors=True)

# A busy machine is a valid place to test: no example fails for being slow. The same examples in
# every run, so that a change is judged by itself; `make fuzz` draws others.
settings.register_profile("other-examples", deadline=None)
settings.register_profile("same-examples", deadline=None, derandomize=True)
settings.load_profile("same-examples")

_exit_status = pytest.StashKey[int]()

# A module that imports one of these starts a Ray; tests/serving/cluster.py holds them.
_STARTS_RAY = ("local_ray", "local_serve", "short_tmp")
_RAY_FOLDERS = ("e2e", "serving")
"""Where `make test` looks for them."""


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items):
    """Mark the tests of every module that starts a Ray."""
    for item in items:
        if isinstance(item, pytest.Function) and set(_STARTS_RAY) & set(vars(item.module)):
            item.add_marker("ray")
            assert item.path.parent.name in _RAY_FOLDERS, f"{item.path} starts a Ray"


@pytest.fixture(autouse=True)
def _no_ray_by_accident(request, monkeypatch):
    """Many functions of Ray start one if there is none; only marked tests may."""
    if "ray" in sys.modules and request.node.get_closest_marker("ray") is None:
        monkeypatch.setattr("ray.init", _refuse_ray)


def _refuse_ray(*args, **options):
    raise AssertionError("a test without marker ray would start a Ray, or join any on the machine")


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem):
    """Run a test that is a coroutine function, in an event loop of its own."""
    if not inspect.iscoroutinefunction(pyfuncitem.obj):
        return None
    names = pyfuncitem._fixtureinfo.argnames
    asyncio.run(pyfuncitem.obj(**{name: pyfuncitem.funcargs[name] for name in names}))
    return True


def pytest_sessionfinish(session, exitstatus):
    session.config.stash[_exit_status] = int(exitstatus)


@pytest.hookimpl(trylast=True)
def pytest_unconfigure(config):
    """Ends the process as soon as everything that wants to end in order has.

    Several ranks of gloo share this process in the tests of tensor parallelism. Its threads can
    outlive what they call while the interpreter takes itself apart: once that was a crash after
    the last test had passed.
    """
    if _exit_status in config.stash:
        atexit._run_exitfuncs()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(config.stash[_exit_status])
