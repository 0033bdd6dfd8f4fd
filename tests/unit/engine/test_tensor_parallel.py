"""Several ranks give the text of one, and end together."""

import asyncio
import os
import random
import signal
import subprocess
import sys
import threading
import time
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest

from serve_spec.config import ConfigError
from serve_spec.core.draft import DraftShape
from serve_spec.core.errors import CheckpointError
from serve_spec.core.grammar import Grammar
from serve_spec.core.request import SamplingParams
from serve_spec.engine import build
from serve_spec.models.decoder import Decoder
from serve_spec.ops import draw, rejection
from serve_spec.parallel.worker_ranks import RankLost
from serve_spec.worker.drafters.autoregressive import AutoregressiveDrafter
from tests.helpers.checkpoints import make_eagle3
from tests.helpers.engines import SOON_S, llm_maker, make_pair, recorded_plans, switch_every_round
from tests.helpers.local_engine import LocalEngine
from tests.helpers.plain_logprobs import close
from tests.helpers.table import make_medusa

four_heads = partial(make_medusa, num_heads=4)
SWITCHING = (0, 7, 1, 0, 3, 0, 0, 7)


@pytest.fixture(scope="module")
def shared_pair(tmp_path_factory):
    """Heads for four ranks, and a vocabulary that four do not divide."""
    return make_pair(tmp_path_factory.mktemp("pair"), num_key_value_heads=4, vocab=291)


@pytest.fixture(scope="module")
def make(shared_pair):
    return llm_maker(shared_pair, "cpu")


def requests():
    """Prompts of 1 to 40 tokens, greedy, sampled, filtered, with edited scores, by a grammar.

    Some ask for log-probabilities: each rank has some columns of the logits only.
    """
    rng = random.Random(0)
    prompts = [[rng.randrange(256) for _ in range(n)] for n in (1, 5, 20, 33, 40, 16)]
    params = [
        SamplingParams(max_tokens=20 + 3 * i, temperature=0.5 * (i % 3), seed=i, ignore_eos=True)
        for i in range(5)
    ]
    params[1] = replace(params[1], prompt_logprobs=2, logprobs=0)
    params[2] = replace(params[2], frequency_penalty=1.0, logit_bias={65: 3.0, 290: 1.5})
    params[3] = replace(params[3], grammar=Grammar.regex("([a-z]{2,5} [0-9]{1,3},)+"))
    params[4] = replace(params[4], logprobs=3)
    return prompts, [*params, SamplingParams(max_tokens=30, top_k=20, seed=9, ignore_eos=True)]


def texts(llm):
    return [output.token_ids for output in llm.generate(*requests())]


@pytest.fixture(scope="module")
def one(make):
    """Return the outputs of one rank without speculation."""
    return make().generate(*requests())


@pytest.fixture(scope="module")
def plain(one):
    return [output.token_ids for output in one]


def is_worker_rank():
    return threading.current_thread().name.startswith("rank")


def stressed(make, algorithm, **overrides):
    """Another depth and budget every round, too few pages, prompts in chunks."""
    llm = make(algorithm, 3, num_pages=32, max_num_batched_tokens=24, **overrides)
    switch_every_round(llm, SWITCHING, budgets=True)
    return llm


@pytest.mark.parametrize(("algorithm", "size", "ahead"), [("EAGLE3", 2, True), ("EAGLE", 4, False)])
def test_any_number_of_ranks_gives_the_texts_of_one(threads, make, one, algorithm, size, ahead):
    """Also from the pages that rank 0 finds. Four ranks do not divide the vocabulary."""
    llm = stressed(make, algorithm, tensor_parallel_size=size, async_scheduling=ahead)
    plans = recorded_plans(llm)
    for _ in range(4 // size):
        close(llm.generate(*requests()), one)
    assert ahead == any(plan.follows for plan in plans)
    counters = llm.engine.counters
    assert 0 < counters.num_correct_drafts < counters.num_draft_tokens
    assert size > 2 or counters.num_prefix_hit_tokens > 0
    assert llm.engine.scheduler.queue.num_preemptions > 0
    llm.shutdown()


@pytest.mark.parametrize("algorithm", ["EAGLE3", "EAGLE", "MEDUSA", "STANDALONE"])
def test_a_whole_draft_on_every_rank_gives_the_texts_of_a_shared_one(
    threads, make, plain, algorithm, tmp_path
):
    keys = {"tensor_parallel_size": 2}
    # Ranks share neither the one head of attention of the pair's EAGLE3, nor its Medusa blocks.
    if make_head := {"EAGLE3": make_eagle3, "MEDUSA": four_heads}.get(algorithm):
        head = make_head(tmp_path / "head", make().config.model.folder)
        keys["speculative_draft_model_path"] = str(head)
    sizes = {}
    for ranks in (None, 2, 1):
        llm = make(algorithm, 3, speculative_draft_tp_size=ranks, **keys)
        sizes[ranks] = sum(each.numel() for each in llm.engine.worker.drafter.head.parameters())
        assert texts(llm) == plain
        assert llm.engine.counters.num_draft_tokens > 0
        llm.shutdown()
    assert sizes[1] > sizes[2] == sizes[None]


def test_a_draft_that_the_ranks_cannot_share_is_refused_if_they_have_to(threads, make):
    for ranks in (None, 1):
        make("EAGLE3", 2, tensor_parallel_size=2, speculative_draft_tp_size=ranks).shutdown()
    with pytest.raises(CheckpointError, match="speculative_draft_tp_size=2: this draft cannot"):
        make("EAGLE3", 2, tensor_parallel_size=2, speculative_draft_tp_size=2)
    with pytest.raises(ConfigError, match=r"_tp_size=4: use 1, or 2 \(tensor_parallel_size\)"):
        make("EAGLE3", 2, tensor_parallel_size=2, speculative_draft_tp_size=4)
    with pytest.raises(ConfigError, match="_tp_size=2: the target has one rank"):
        make("EAGLE3", 2, speculative_draft_tp_size=2)


def test_ranks_that_draft_and_draw_otherwise_than_rank_0_emit_its_tokens(
    threads, make, plain, monkeypatch
):
    """Worse than any rounding: the worker ranks draft and draw other tokens than rank 0."""

    def spoiled(tokens):
        return (tokens + 1) % 256 if is_worker_rank() else tokens

    draft, drawn, own = AutoregressiveDrafter.draft, draw.draw_tokens, draw.likeliest_children

    def draft_otherwise(self, buffers, *sizes):
        draft(self, buffers, *sizes)
        buffers.drafts.copy_(spoiled(buffers.drafts))
        if is_worker_rank():
            buffers.draft_logprobs.copy_(buffers.draft_logprobs.flip(0) - 1)

    def others(scores, topk, ids):
        children, likely = own(scores, topk, ids)
        return (children, likely.flip(1)) if is_worker_rank() else (children, likely)

    monkeypatch.setattr(AutoregressiveDrafter, "draft", draft_otherwise)
    monkeypatch.setattr(draw, "draw_tokens", lambda *args, **more: spoiled(drawn(*args, **more)))
    monkeypatch.setattr(draw, "likeliest_children", others)
    llm = make("EAGLE3", 3, speculative_eagle_topk=3, tensor_parallel_size=2)
    shapes = [DraftShape(4, 12, 3), 0, 3, DraftShape(2, 5, 3), 7]
    switch_every_round(llm, shapes, budgets=True)
    plans = recorded_plans(llm)
    assert texts(llm) == plain
    # Beside a grammar all drafts of trees are verified.
    prompts, params = requests()
    del prompts[3], params[3]
    found = [output.token_ids for output in llm.generate(prompts, params)]
    assert found == [*plain[:3], *plain[4:]]
    assert any(plan.budget and not plan.shape.is_chain for plan in plans)
    assert any(plan.budget and plan.shape.is_chain for plan in plans)
    counters = llm.engine.counters
    assert counters.num_correct_drafts > counters.num_decode_requests / 2
    llm.shutdown()


@pytest.mark.parametrize("method", ["standard", "block"])
def test_ranks_keep_the_sampled_drafts_that_rank_0_keeps(threads, make, method, monkeypatch):
    """WorkerRanks would lose all of them, and replace them by nonsense."""
    reject = rejection.reject_drafts

    def reject_otherwise(*args):
        kept = reject(*args)
        if is_worker_rank():
            kept.zero_()
            args[2].add_(1).remainder_(256)
        return kept

    monkeypatch.setattr(rejection, "reject_drafts", reject_otherwise)
    found = []
    for size in (1, 2):
        llm = make(
            "EAGLE3",
            3,
            tensor_parallel_size=size,
            async_scheduling=False,
            rejection_sample_method=method,
        )
        found.append(texts(llm))
        assert llm.engine.counters.num_correct_drafts > 0
        llm.shutdown()
    assert found[0] == found[1]


def test_caches_are_as_large_as_the_rank_with_the_least_room_has_them(threads, make, monkeypatch):
    monkeypatch.setattr(build, "_num_pages", lambda *args: 70 if is_worker_rank() else 90)
    llm = make(tensor_parallel_size=2)
    assert llm.engine.scheduler.cache.num_pages == 70
    llm.shutdown()


def test_one_rank_starts_no_process_and_neither_does_what_cannot_be_sharded(make, monkeypatch):
    monkeypatch.setattr(build, "launch", None)
    llm = make("EAGLE3", 3, tensor_parallel_size=1)
    llm.engine.check_health()
    llm.shutdown()
    with pytest.raises(CheckpointError, match="tensor_parallel_size=3 does not divide"):
        make(tensor_parallel_size=3)


def test_a_refusal_of_rank_0_ends_the_others(threads, make, monkeypatch):
    started = []
    launch = build.launch
    monkeypatch.setattr(build, "launch", lambda *args: started.append(launch(*args)) or started[0])
    with pytest.raises(ValueError, match="num_pages=4"):
        make(tensor_parallel_size=2, num_pages=4)
    with pytest.raises(RankLost):
        started[0].check()


def rank_1_pid(engine):
    assert engine._worker_ranks is not None
    (process,) = engine._worker_ranks._processes.values()
    return process.pid


def is_running(pid):
    try:
        return "\nState:\tZ" not in Path(f"/proc/{pid}/status").read_text()
    except FileNotFoundError:
        return False


def wait_until_ended(pid):
    deadline = time.monotonic() + SOON_S
    while is_running(pid):
        assert time.monotonic() < deadline, f"process {pid} is still there"
        time.sleep(0.05)


def test_ranks_in_processes_give_the_text_of_one_and_end_at_shutdown(make, plain):
    llm = stressed(make, "EAGLE3", tensor_parallel_size=2)
    assert texts(llm) == plain
    assert llm.engine.scheduler.queue.num_preemptions > 0
    pid = rank_1_pid(llm.engine)
    assert is_running(pid)
    llm.shutdown()
    assert not is_running(pid)


def test_a_rank_that_fails_in_a_step_is_an_error_and_not_a_wait(threads, make, monkeypatch):
    llm, forward = make(tensor_parallel_size=2), Decoder.forward

    def fail(*args, **keys):
        if is_worker_rank():
            raise ValueError("broken")
        return forward(*args, **keys)

    monkeypatch.setattr(Decoder, "forward", fail)
    for _ in range(2):
        with pytest.raises(RankLost, match="rank 1 of 2 failed: ValueError: broken"):
            llm.generate([[1, 2, 3]], SamplingParams(max_tokens=8))
    llm.shutdown()


def test_an_idle_loop_without_one_of_its_ranks_is_not_healthy(threads, make):
    """Without a request only the health check can notice."""
    config = make().config
    loop = LocalEngine(type(config).load(config, tensor_parallel_size=2))
    loop.check_health()
    worker_ranks = loop.engine._worker_ranks
    assert worker_ranks is not None
    worker_ranks.broadcast("nonsense")  # no worker rank survives it
    assert worker_ranks._has_lost.wait(SOON_S)
    loop._reader.join(SOON_S)
    with pytest.raises(RuntimeError, match="rank 1 of 2 failed: AssertionError"):
        loop.check_health()
    with pytest.raises(RuntimeError, match="rank 1 of 2"):
        asyncio.run(loop.submit([1, 2], SamplingParams(), "a"))
    loop.shutdown()


def test_a_rank_that_hangs_ends_its_streams_instead_of_holding_them(make):
    config = make().config
    loop = LocalEngine(type(config).load(config, tensor_parallel_size=2, round_timeout_s=1.0))
    pid = rank_1_pid(loop.engine)

    async def scenario():
        os.kill(pid, signal.SIGSTOP)
        stream = await loop.submit([1, 2, 3], SamplingParams(max_tokens=50), "a")
        while True:
            try:
                loop.check_health()
            except RuntimeError:
                break
            await asyncio.sleep(0.05)
        await stream.each(lambda delta: None)

    with pytest.raises(RuntimeError, match=r"longer than replica\.round_timeout_s=1 seconds"):
        asyncio.run(scenario())
    wait_until_ended(pid)
    loop.shutdown()


def program(target):
    """Return a program of two ranks that prints the process of rank 1."""
    return (
        "from serve_spec import LLM, SamplingParams\n"
        f"llm = LLM({{'model': {{'path': {str(target)!r}, 'device': 'cpu',"
        " 'tensor_parallel_size': 2}}, max_model_len=128)\n"
        "(process,) = llm.engine._worker_ranks._processes.values()\n"
        "print(process.pid, flush=True)\n"
        "llm.generate([[1, 2, 3]])\n"
    )


def test_without_rank_0_no_other_lives_on(shared_pair):
    """Rank 0 is killed in the middle of a text."""
    endless = "params = SamplingParams(max_tokens=100)\nwhile True: llm.generate([[1]], params)\n"
    command = [sys.executable, "-c", program(shared_pair.target) + endless]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as rank_0:
        pid = int(rank_0.stdout.readline())
        rank_0.kill()
    wait_until_ended(pid)


def test_a_program_that_does_not_shut_down_ends_in_order(shared_pair):
    """No thread of a group may outlive the interpreter: it would take the process down."""
    command = [sys.executable, "-c", program(shared_pair.target)]
    subprocess.run(command, check=True, timeout=4 * SOON_S)
