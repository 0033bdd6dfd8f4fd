"""What every test shares: one thread, a cache of its own, no clock that could fail a test."""

import atexit
import os
import shutil
import tempfile

from hypothesis import settings

# The cores are few and shared. Before torch is imported anywhere; child processes inherit it.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

# Costs that engines measure under test are nobody's to keep.
_cache = tempfile.mkdtemp(prefix="serve-spec-test-cache-")
os.environ["SERVE_SPEC_CACHE"] = _cache
atexit.register(shutil.rmtree, _cache, ignore_errors=True)

# A busy machine is a valid place to test: no example fails for being slow.
settings.register_profile("unhurried", deadline=None)
settings.load_profile("unhurried")
