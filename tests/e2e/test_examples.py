"""The programs of examples/, as users start them; `test_serve_tiny.py` runs the one that serves."""

import re
import subprocess
import sys
from pathlib import Path

from serve_spec.config import ServeSpecConfig
from tests.helpers.local_engine import LocalEngine
from tests.serving.asgi import Server, listening
from tests.serving.fakes import LoopFleet

ROOT = Path(__file__).parents[2]
EXAMPLES = ROOT / "examples"


def run(name, *args):
    """Return what an example prints."""
    command = [sys.executable, str(EXAMPLES / name), *args]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_every_example_is_in_the_table_and_runs_in_a_test():
    files = {path.name for path in EXAMPLES.iterdir() if path.suffix in (".py", ".sh")}
    assert files == set(re.findall(r"\]\((\w+\.\w+)\)", (EXAMPLES / "README.md").read_text()))
    tests = "".join(path.read_text() for path in (ROOT / "tests/e2e").glob("test_*.py"))
    assert {name for name in files if f'"{name}"' not in tests} == set()


def test_offline_prints_texts_that_speculation_does_not_change():
    printed = run("offline.py")
    assert "def fibonacci(n):\n" in printed
    lengths = re.findall(r"^# (\d\.\d\d) tokens a round, the same text$", printed, re.MULTILINE)
    # How deep it drafts depends on what this machine measured.
    assert len(lengths) == 2


def test_async_streams_end_with_all_tokens():
    found = re.findall(
        r"^# (\w+): 48 tokens in (\d+) outputs$", run("async_streams.py"), re.MULTILINE
    )
    assert {name for name, _ in found} == {"fibonacci", "stack"}
    assert all(1 < int(num_outputs) <= 48 for _, num_outputs in found)


def test_a_policy_of_the_example_drafts_for_small_batches_only():
    lengths = [float(n) for n in re.findall(r": (\d\.\d\d) tokens a round", run("own_policy.py"))]
    one, two, four = lengths
    assert one > 1
    assert two > 1
    assert four == 1


def test_a_chat_with_tools_calls_a_function_and_tells_the_result():
    config = ServeSpecConfig.load(
        "asset:tiny", device="cpu", dtype="float32", speculative_adaptive=False
    )
    loop = LocalEngine(config)
    try:
        with listening(Server(config, LoopFleet(loop)).app) as port:
            printed = run("chat_with_tools.py", f"http://127.0.0.1:{port}")
    finally:
        loop.shutdown()
    call, *answer = printed.splitlines()
    assert re.fullmatch(r"population\((Lima|Oslo|Quito)\) = \d+", call)
    assert "".join(answer).strip()
