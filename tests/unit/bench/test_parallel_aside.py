"""A process beside this one answers, or its failure is told in words."""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest

from serve_spec.bench.parallel import aside as parallel_aside
from serve_spec.bench.parallel.aside import Aside, AsideFailed


class Counter:
    """Leaves a file when it is closed."""

    def __init__(self, file: Path) -> None:
        self.file = file
        self.count = 0

    def add(self, number: int) -> tuple[int, int]:
        self.count += number
        return os.getpid(), self.count

    def refuse(self) -> None:
        raise ValueError("no such number")

    def leave(self) -> str:
        folder = tempfile.mkdtemp()
        assert Path(folder).exists()
        return folder

    def end(self) -> None:
        os._exit(7)

    def hang(self) -> None:
        time.sleep(600)

    def close(self) -> None:
        self.file.write_text(str(self.count))


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "count"


@pytest.fixture
def aside(file: Path) -> Iterator[Aside[Counter]]:
    with Aside(partial(Counter, file), 60.0) as aside:
        yield aside


def test_another_process_remembers_what_it_did_and_closes_its_subject_at_the_end(
    aside: Aside[Counter], file: Path
) -> None:
    pid, first = aside.ask(Counter.add, 2)
    assert (pid, 5) == aside.ask(Counter.add, number=3)
    assert first == 2
    assert pid != os.getpid()
    assert not file.exists()
    aside.close()
    assert file.read_text() == "5"
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)


def test_an_error_is_told_in_words_and_leaves_the_process_as_it_was(aside: Aside[Counter]) -> None:
    aside.ask(Counter.add, 2)
    with pytest.raises(AsideFailed, match=r"^ValueError: no such number$"):
        aside.ask(Counter.refuse)
    assert aside.ask(Counter.add, 0)[1] == 2


def test_a_process_that_ends_by_itself_is_told_with_its_exit_code(aside: Aside[Counter]) -> None:
    with pytest.raises(AsideFailed, match="exit code 7"):
        aside.ask(Counter.end)
    with pytest.raises(AsideFailed, match="exit code 7"):
        aside.ask(Counter.add, 1)


def test_one_that_hangs_is_killed_when_the_time_of_all_its_answers_is_up(
    file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(parallel_aside, "_REST_S", 0.0)  # it has started nobody
    with Aside(partial(Counter, file), 60.0) as aside:
        pid, _ = aside.ask(Counter.add, 1)
        aside._left_s = 0.1  # as if answers had taken the rest
        with pytest.raises(AsideFailed, match="no answer within limit_s=60"):
            aside.ask(Counter.hang)
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)
    assert not file.exists()


def test_what_it_leaves_in_temporary_folders_goes_however_it_ends(aside: Aside[Counter]) -> None:
    folder = aside.ask(Counter.leave)
    with pytest.raises(AsideFailed):
        aside.ask(Counter.end)
    assert Path(folder).exists()
    aside.close()
    assert not Path(folder).exists()


def test_time_that_nobody_waited_for_an_answer_does_not_count(aside: Aside[Counter]) -> None:
    aside.ask(Counter.add, 1)
    left = aside._left_s
    time.sleep(0.01)
    assert aside._left_s == left
    aside.ask(Counter.add, 1)
    assert aside._left_s < left < 60.0
