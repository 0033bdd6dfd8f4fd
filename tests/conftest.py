"""What every test shares: one thread per process, because the cores are few and shared."""

import os

# Before torch is imported anywhere; workers that tests start inherit it.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
