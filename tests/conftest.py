"""What every test shares: one thread per process, and no clock that could fail a test."""

import os

from hypothesis import settings

# The cores are few and shared. Before torch is imported anywhere; child processes inherit it.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

# A busy machine is a valid place to test: no example fails for being slow.
settings.register_profile("unhurried", deadline=None)
settings.load_profile("unhurried")
