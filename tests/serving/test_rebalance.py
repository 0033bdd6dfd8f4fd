"""Requests move from where they wait to where there is room, and no others do."""

import pytest

from serve_spec.serving.routing import requests_to_move


def state(running, waiting=0, decoding=None, **more):
    decoding = running if decoding is None else decoding
    return {"num_running": running, "num_waiting": waiting, "batch_size": decoding, **more}


WAITING = [f"r{i}" for i in range(6)]
SHORT = {"kv": {"free_pages": 1, "total_pages": 100}}


@pytest.mark.parametrize(
    ("busy", "idle", "moved"),
    [
        (state(8, 6), state(0), WAITING),
        (state(8, 6), state(5), WAITING[:3]),
        (state(8, 4), state(0), WAITING[2:]),
        (state(8, 6, decoding=6), state(0), WAITING[2:]),
        (state(8, 0), state(0), []),
        (state(8, 6), state(8), []),
        (state(8, 6), state(4, 4), []),
        (state(8, 6), state(0, is_healthy=False), []),
        (state(8, 6), state(2, 1, **SHORT), []),
        (state(8, 9), state(0), WAITING),
    ],
    ids=[
        "all of them",
        "as many as there are places",
        "the oldest have begun",
        "the oldest compute their prompts",
        "none waits",
        "no place",
        "a queue there too",
        "a sick replica",
        "no pages",
        "another router's wait, too",
    ],
)
def test_waiting_requests_move_to_free_places(busy, idle, moved):
    stats = {"busy": busy, "idle": idle}
    assert requests_to_move({"busy": WAITING}, stats, num_slots=8) == moved


def test_nothing_moves_from_a_replica_that_does_not_answer():
    assert requests_to_move({"busy": WAITING}, {"idle": state(0)}, num_slots=8) == []
