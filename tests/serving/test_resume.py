"""A replica that dies costs its streams nothing: no token lost, none repeated."""

import asyncio
import copy
from contextlib import aclosing
from types import SimpleNamespace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from serve_spec.core.request import FinishReason, SpeculationStats, TokenDelta
from serve_spec.serving.errors import ApiError, ReplicaLost, client_too_slow, no_replica, queue_full
from serve_spec.serving.messages import Accepted, Failed
from serve_spec.serving.resume import resumed
from tests.serving.fakes import FAR_S, MortalFleet, ScriptedFleet, Takes, delta, request


class CountingFleet(MortalFleet):
    """Its replicas say with every delta what speculation has done on them so far."""

    def __init__(self, *lives, forced):
        super().__init__(*lives)
        self.forced = forced

    async def generate(self, asked):
        counts = SpeculationStats(synthetic_acceptance=self.forced)
        async with aclosing(super().generate(asked)) as items:
            async for item in items:
                if isinstance(item, TokenDelta):
                    counts.observe(2 + len(self.requests), len(item.token_ids) - 1)
                    item = item._replace(speculation=copy.deepcopy(counts))
                yield item


def listen(fleet, asked, resume_timeout_s=FAR_S):
    """Return what a caller hears: whatever was accepted, and the deltas."""

    async def scenario():
        return [item async for item in resumed(fleet, asked, resume_timeout_s)]

    heard = asyncio.run(scenario())
    accepted = [item for item in heard if isinstance(item, Accepted)]
    return SimpleNamespace(accepted=accepted, deltas=heard[len(accepted) :])


def said(answer):
    tokens = [token for d in answer.deltas for token in d.token_ids]
    return "".join(d.text for d in answer.deltas), tokens, answer.deltas[-1].finish_reason


LIVES = st.tuples(
    st.lists(st.integers(0, 12).map(Takes), max_size=2),
    st.lists(st.integers(0, 12), max_size=1),
    st.lists(st.integers(0, 12).map(Takes), max_size=2),
).map(lambda parts: [life for part in parts for life in part])
"""At most one replica dies; any number of times the router takes the request back."""


@settings(deadline=None, max_examples=150)
@given(
    seed=st.integers(0, 2**63),
    max_tokens=st.integers(1, 24),
    lives=LIVES,
    stop=st.lists(st.text("ab é", min_size=1, max_size=4), max_size=2),
    include_stop_str_in_output=st.booleans(),
    ignore_eos=st.booleans(),
    stop_token_ids=st.lists(st.sampled_from(list(b"ab ")), max_size=1),
)
def test_wherever_it_is_lost_or_taken_back_the_answer_is_that_of_one_replica_that_lives(
    lives, **params
):
    whole = listen(MortalFleet(), request("the prompt", **params))
    fleet = MortalFleet(*lives)
    broken = listen(fleet, request("the prompt", **params))
    assert said(broken) == said(whole)
    assert [a.num_prompt_tokens for a in broken.accepted] == [10]
    assert broken.deltas[-1].speculation is not None


@settings(deadline=None, max_examples=60)
@given(lives=LIVES, max_tokens=st.integers(1, 40), forced=st.booleans())
def test_speculation_is_added_up_and_forced_acceptance_labelled_over_all_replicas(
    lives, max_tokens, forced
):
    fleet = CountingFleet(*lives, forced=forced)
    answer = listen(fleet, request("x", seed=1, max_tokens=max_tokens, ignore_eos=True))
    counts = answer.deltas[-1].speculation
    assert counts.num_rounds == len(answer.deltas)
    assert counts.num_correct_drafts == max_tokens - len(answer.deltas)
    assert sum(counts.rounds_by_num_steps.values()) == counts.num_rounds
    drafts = sum(steps * rounds for steps, rounds in counts.rounds_by_num_steps.items())
    assert counts.num_draft_tokens == drafts
    used = lives[: len(fleet.requests) - 1]
    num_resumes = sum(not isinstance(life, Takes) and life > 0 for life in used)
    assert counts.as_dict()["num_resumes"] == num_resumes
    assert counts.as_dict().get("synthetic_acceptance", False) is forced


def test_a_request_without_a_seed_gets_one_that_all_its_replicas_share():
    fleet = MortalFleet(3, Takes(3))
    listen(fleet, request("x", max_tokens=30, ignore_eos=True))
    seeds = {asked.params.seed for asked in fleet.requests}
    assert len(fleet.requests) == 3
    assert len(seeds) == 1
    assert None not in seeds
    other = MortalFleet()
    listen(other, request("x"))
    assert other.requests[0].params.seed not in seeds, "a fresh one for every request"


def test_replicas_that_lost_it_are_to_be_avoided_and_no_attempt_has_another_s_id():
    fleet = MortalFleet(Failed("boom", replica="sick"), Takes(2))
    listen(fleet, request("x", seed=1, max_tokens=30, ignore_eos=True))
    assert [asked.avoid for asked in fleet.requests] == [set(), {"sick"}, {"sick"}]
    assert [asked.is_resumption for asked in fleet.requests] == [False, True, False]
    assert len({asked.request_id for asked in fleet.requests}) == 3


SHUT_DOWN = ReplicaLost(no_replica("shutting down"), is_orderly=True)


@pytest.mark.parametrize("endings", [[3], [Takes(3)], [SHUT_DOWN] * 5], ids=str)
def test_what_has_begun_waits_for_a_replica_that_has_room(endings):
    """However often the ones before were shut down."""
    full = no_replica("none"), queue_full("full", 1), Failed("full", True)
    asked = request("x", seed=1, max_tokens=30, ignore_eos=True)
    assert said(listen(MortalFleet(*endings, *full), asked)) == said(listen(MortalFleet(), asked))


def test_when_nobody_takes_it_in_time_the_error_says_why():
    fleet = MortalFleet(3, *[no_replica("none is running")] * 3)
    asked = request("x", seed=1, max_tokens=30, ignore_eos=True)
    with pytest.raises(ApiError, match="none is running"):
        listen(fleet, asked, resume_timeout_s=0)
    assert len(fleet.requests) == 2


@pytest.mark.parametrize("life", [0, 3])
def test_a_request_that_has_lost_two_replicas_is_not_given_to_a_third(life):
    fleet = MortalFleet(*[life] * 9)
    with pytest.raises(ApiError, match="not retried") as caught:
        listen(fleet, request("x", seed=1, max_tokens=90, ignore_eos=True))
    assert caught.value.status == 500
    assert len(fleet.requests) == 2


@pytest.mark.parametrize("error", [no_replica("none"), queue_full("full", 1)], ids=str)
def test_what_nobody_took_yet_is_refused_at_once(error):
    fleet = MortalFleet(error)
    with pytest.raises(ApiError) as caught:
        listen(fleet, request())
    assert caught.value is error
    assert len(fleet.requests) == 1


def test_an_engine_that_shuts_down_has_not_finished_the_answer():
    aborted = delta("", finish=FinishReason.ABORT)
    fleet = ScriptedFleet([Accepted(1, "r1"), delta("a", 1), aborted])
    fleet.next = [no_replica("none is running")]
    with pytest.raises(ApiError, match="none is running"):
        listen(fleet, request(), resume_timeout_s=0)


def test_a_client_that_does_not_read_is_no_failure_of_its_replica():
    fleet = ScriptedFleet([Accepted(1, "r1"), delta("a", 1), client_too_slow(4096)])
    fleet.next = [Accepted(1, "r2"), delta("b", 2, finish=FinishReason.STOP)]
    with pytest.raises(ApiError) as caught:
        listen(fleet, request())
    assert caught.value.code == "client_too_slow"
