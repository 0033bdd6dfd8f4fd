"""Tiny random pairs whose drafts are right sometimes, and engines that check themselves."""

import json
import random
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from types import SimpleNamespace

import torch

from serve_spec import LLM
from serve_spec.adaptive import PolicySettings
from serve_spec.core.draft import DraftShape
from serve_spec.core.request import SamplingParams
from serve_spec.core.round import NO_NOTES, RoundSteps
from tests.helpers.checkpoints import make_eagle, make_eagle3, make_target, write_checkpoint

SOON_S = 30.0
"""Far below any time limit of what ranks wait for; a busy machine needs some of it."""


@dataclass(frozen=True)
class Pair:
    """Folders of a target and of its heads."""

    target: Path
    heads: dict[str, Path]


def make_pair(root, **config):
    """A random pair under `root`; `config` replaces keys of the target's config.json."""
    target = make_target(root / "target", layer_scale=0.3, **config)
    return Pair(
        target,
        {
            "EAGLE3": make_eagle3(root / "eagle3", target, mimic=True),
            "EAGLE": make_eagle(root / "eagle", target, mimic=True),
            # Its own draft: wrong only where it draws at another temperature.
            "STANDALONE": target,
            "MEDUSA": _repeating_heads(root / "medusa", target, num_heads=4),
        },
    )


def _repeating_heads(directory, target, num_heads):
    """Medusa heads that draft the next token again and again."""
    hidden = int(json.loads((target / "config.json").read_text())["hidden_size"])
    tensors = {}
    for head in range(num_heads):
        tensors[f"blocks.{head}.layers.0.weight"] = torch.zeros(hidden, hidden)
        tensors[f"blocks.{head}.layers.0.bias"] = torch.zeros(hidden)
    return write_checkpoint(directory, {"model_type": "medusa", "num_heads": num_heads}, tensors)


class FakeController:
    """Drafts what a function of the batch returns, and records what it observes."""

    switch_reason = None
    notes = NO_NOTES

    def __init__(self, shapes, choose):
        self.shapes = [DraftShape.chain(s) if isinstance(s, int) else s for s in shapes]
        self.choose_steps = choose
        self.observed = []
        self.forgotten = []

    def on_verify_complete(self, verified):
        rows = zip(verified.correct_per_req, verified.steps_per_req, strict=True)
        assert all(0 <= correct <= steps <= verified.shape.depth for correct, steps in rows)
        self.observed.append(verified)

    def forget(self, request_id):
        self.forgotten.append(request_id)

    def snapshot(self):
        return {}


def llm_maker(pair, device):
    """Builds float32 engines on the pair; each checks its integrity after every round.

    slots: of an adaptive config, whose strategy is ema.
    """

    def make(algorithm="NONE", num_steps=0, slots=None, **overrides):
        settings = {
            "model": {"path": str(pair.target), "device": device, "dtype": "float32"},
            "speculative": {
                "speculative_algorithm": algorithm,
                "speculative_num_steps": num_steps,
                "speculative_adaptive": False,
                "speculative_draft_dtype": "float32",
            },
            "cache": {"page_size": 4, "num_pages": 512},
        }
        if algorithm in pair.heads:
            settings["speculative"]["speculative_draft_model_path"] = str(pair.heads[algorithm])
        if slots is not None:
            file = pair.target.parent / "slots.json"
            file.write_text(json.dumps(slots))
            settings["speculative"] |= {
                "speculative_adaptive": True,
                "speculative_adaptive_strategy": "ema",
                "speculative_adaptive_config": str(file),
            }
        return checked(LLM(settings, **{"max_model_len": 128, **overrides}))

    return make


def sampled_requests():
    """Return prompts of 1 to 45 tokens, greedy and sampled in one batch, some with filters."""
    rng = random.Random(0)
    lengths = (1, 2, 5, 11, 20, 33, 45, 16)
    prompts = [[rng.randrange(256) for _ in range(n)] for n in lengths]
    filters = [{}, {"top_k": 20}, {"top_p": 0.9}, {"min_p": 0.02, "top_k": 50}]
    params = [
        SamplingParams(
            max_tokens=16 + 2 * i,
            temperature=(0.0, 0.7, 1.0)[i % 3],
            seed=40 + i,
            ignore_eos=True,
            **filters[i % 4],
        )
        for i in range(len(lengths))
    ]
    return prompts, params


def texts(outputs):
    """The generated tokens of every request."""
    return [output.token_ids for output in outputs]


def checked(llm):
    """The same engine, with its pages and lengths, and what it keeps, verified after every step."""
    engine, step = llm.engine, llm.engine.step

    def step_and_check():
        deltas = step()
        engine.scheduler.queue.check_integrity()
        if not engine.has_work:
            ngrams = engine.scheduler.drafts.ngrams
            grammars = engine.worker.grammars
            assert not {**grammars._texts, **grammars._jobs}, "the grammar of an ended request"
            assert ngrams is None or len(ngrams) == 0, "the text of a request that ended"
            assert not getattr(getattr(ngrams, "drafter", None), "_texts", ()), "its index"
        return deltas

    llm.engine.step = step_and_check
    return llm


def control(llm, controller):
    """Replace the policy of an engine."""
    llm.engine.worker.init_states(controller.shapes)
    llm.engine.controller = controller
    return controller


def policy_with_small_trees(config, loaded):
    """Return the policy that a GPU would have. For `engine.build._policy`."""
    head = loaded.head
    return PolicySettings.of(config.speculative, None if head is None else head.max_steps)


def always_three(llm):
    """Replace the policy by one that drafts chains of three."""
    return control(llm, FakeController([3], lambda _: RoundSteps(DraftShape.chain(3))))


def switching_controller(depths, *, ragged=True, budgets=False):
    """Return a policy that chooses another depth or shape every round.

    ragged: each request drafts another part of it. budgets: also change how many are verified.
    """
    numbers = count()

    def choose(batch):
        number = next(numbers)
        shape = controller.shapes[number % len(depths)]
        steps_per_req = [max(0, shape.depth - (number + 1 + i) % 3) for i in range(batch.size)]
        budget = None
        if budgets and number % 3:
            budget = batch.size * shape.size * (number % 4) // 4
        return RoundSteps(shape, steps_per_req if ragged else None, budget=budget)

    controller = FakeController(depths, choose)
    return controller


def switch_every_round(llm, depths, **keys):
    """Replace the policy of an engine by a `switching_controller`."""
    control(llm, switching_controller(depths, **keys))


def recorded_steps(llm):
    """Return the record of every step from now on."""
    steps = []
    summarize = llm.collector.observe

    def observe(record):
        steps.append(record)
        summarize(record)

    llm.engine.metrics = SimpleNamespace(observe=observe)
    return steps


def recorded_plans(llm):
    """Return every plan that the worker receives from now on."""
    plans = []
    submit = llm.engine.worker.submit

    def record(plan):
        plans.append(plan)
        return submit(plan)

    llm.engine.worker.submit = record
    return plans


def recorded_rounds(llm):
    """Return each request of every plan from now on, with the tokens that it emitted."""
    rounds = []
    commit = llm.engine.scheduler.commit

    def record(plan, result, cut):
        rounds.extend(zip(plan.sampling_requests, result.token_ids, strict=True))
        return commit(plan, result, cut)

    llm.engine.scheduler.commit = record
    return rounds
