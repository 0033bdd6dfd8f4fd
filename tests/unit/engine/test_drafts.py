"""An engine drafts what a plainly written head drafts after the same text.

Texts do not depend on drafts. So this holds the logits of every draft
against a recomputation of all that came before it: the target's features of the text, one to a
token, and the head over them. A feature of the wrong token, a missing entry, one left over from a
rejected draft or a wrong position would show.
"""

import pytest
import torch

from serve_spec import LLM
from serve_spec.core.request import SamplingParams
from serve_spec.models.interfaces import FeatureCapture
from serve_spec.models.loader import load_target
from serve_spec.worker.request_slots import RING_TOKENS
from tests.helpers.checkpoints import (
    VOCAB,
    make_eagle,
    make_eagle3,
    make_mtp,
    make_target,
    read_checkpoint,
    write_checkpoint,
)
from tests.helpers.engines import Pair, llm_maker, recorded_plans, switch_every_round
from tests.helpers.paged import run_text
from tests.helpers.plain_heads import PlainHead
from tests.unit.models.draft_formats import medusa_tensors
from tests.unit.models.test_medusa import plain_logits

STEPS = 4
TOLERANCE = 2e-4

WINDOW = {"sliding_window": 9, "layer_types": ["sliding_attention"]}
# Random heads are sensitive to all they read, mimics keep drafts.
EAGLE_HEADS = {
    "eagle3": ("EAGLE3", {}),
    "eagle3 of few tokens that keeps drafts": ("EAGLE3", {"mimic": True, "draft_vocab": 200}),
    "eagle3 of few tokens": ("EAGLE3", {"draft_vocab": 100, "norm_output": True}),
    "eagle3 of its own width": (
        "EAGLE3",
        {"hidden_size": 16, "head_dim": 8, "own_embedding": True},
    ),
    "eagle3 of two layers": ("EAGLE3", {"num_layers": 2, "norm_before_residual": True}),
    "eagle3 with a window": ("EAGLE3", {**WINDOW, "num_key_value_heads": 2}),
    "eagle": ("EAGLE", {}),
    "eagle that keeps drafts": ("EAGLE", {"mimic": True}),
    "eagle of two layers": ("EAGLE", {"num_layers": 2, "fc_bias": False}),
    "mtp": ("MTP", {"rope_scaling": None}),
    "mtp that keeps drafts": ("MTP", {"rope_scaling": None, "mimic": True}),
}
MAKE = {"EAGLE3": make_eagle3, "EAGLE": make_eagle, "MTP": make_mtp}
# Of six layers: what enters the third, the fourth, and, three from the end, the fourth again; what
# leaves the last.
CAPTURED = {"EAGLE3": (2, 3, 3), "EAGLE": None, "MTP": (6,)}


class Recorder:
    """Record the plans of an engine with one request, and the logits of its drafts."""

    def __init__(self, llm):
        self.plans = recorded_plans(llm)
        self.drafted = []
        worker = llm.engine.worker
        head = worker.drafter.head
        logits = head.logits

        def record(hidden, step=0):
            found = logits(hidden, step)
            if step == 0:
                self.drafted.append([])
            self.drafted[-1].append(found[0].clone())
            return found

        head.logits = record

    def check(self, text, num_prompt, ids, plain):
        """Compare every draft with the plain head's; return how many the text kept."""
        end, total = num_prompt, 0
        drafted = iter(self.drafted)
        for row in (plan.requests[0] for plan in self.plans if plan.requests[0].samples):
            if end >= len(text):
                break  # planned ahead of the end
            kept = 0
            if row.num_steps:
                found = torch.stack(next(drafted)[: row.num_steps])
                best = found.argmax(dim=1)
                drafts = (best if ids is None else ids[best]).tolist()
                expected = plain([*text[:end], *drafts[:-1]], len(drafts))
                assert (found - expected).abs().max() < TOLERANCE * expected.abs().max()
                while kept < len(drafts) and text[end : end + kept + 1] == [*drafts[: kept + 1]]:
                    kept += 1
            total += kept
            end += kept + 1
        assert end >= len(text)
        return total


def run(llm, prompt, num_tokens):
    params = SamplingParams(max_tokens=num_tokens, temperature=0.0, ignore_eos=True)
    (output,) = llm.generate([prompt], params)
    return [*prompt, *output.token_ids]


def features_of(target_dir, capture):
    target = load_target(target_dir, torch.float32)

    return lambda text: run_text(target, torch.tensor(text), capture)[1]


def plain_eagle(target_dir, directory, algorithm):
    """The drafts of a head, and the target's ids of its own."""
    config, tensors = read_checkpoint(directory)
    windowed = "sliding_window" in config
    head = PlainHead(directory, target_dir, **({"window": 9} if windowed else {}))
    features = features_of(target_dir, FeatureCapture(CAPTURED[algorithm]))

    def plain(text, count):
        # Entry j is token j + 1 with feature j; the newest token and the drafts have none yet.
        known = len(text) - count
        ids = torch.tensor(text[1:])
        return head.unroll(ids, features(text[:known]))[1][-count:]

    ids = tensors["t2d"].nonzero().view(-1) if "t2d" in tensors else None
    return plain, ids


SCHEDULES = {
    "steady": ([STEPS], False),
    "paused, planned ahead": ([0, 1, STEPS, 0, 0, 3], True),
    "long paused, planned ahead": ([0] * (RING_TOKENS + 6) + [STEPS] * 30, True),
}
# After a long pause heads differ by their number of layers and by what these attend to.
PAUSING = ("eagle3", "eagle3 of two layers", "eagle3 with a window", "eagle")


def check_drafts(pair, algorithm, head, depths, ids, plain, *, ahead):
    """Compare what an engine drafts after a prompt in chunks, then after a prefix hit, with the
    plain head's; return how many drafts the texts kept."""
    llm = llm_maker(Pair(pair.target, {algorithm: head}), "cpu")(
        algorithm,
        STEPS,
        max_num_batched_tokens=16,
        max_num_seqs=1,
        async_scheduling=ahead,
        max_model_len=192,
    )
    switch_every_round(llm, depths, ragged=False)
    prompt = [(7 * i) % 250 for i in range(21)]
    recorder = Recorder(llm)
    kept = 0
    for _ in range(2):
        text = run(llm, prompt, max(26, len(depths)))
        kept += recorder.check(text, len(prompt), ids, plain)
        assert recorder.drafted
        assert ahead == any(plan.follows for plan in recorder.plans)
        recorder.plans.clear()
        recorder.drafted.clear()
    assert llm.engine.counters.num_prefix_hit_tokens > 0
    return kept


@pytest.mark.parametrize(
    ("name", "schedule"),
    [(name, [*SCHEDULES][at % 2]) for at, name in enumerate(EAGLE_HEADS)]
    + [(name, [*SCHEDULES][2]) for name in PAUSING],
)
def test_eagle_heads_draft_from_the_features_of_the_text(pair, tmp_path, name, schedule):
    algorithm, keys = EAGLE_HEADS[name]
    depths, ahead = SCHEDULES[schedule]
    MAKE[algorithm](tmp_path, pair.target, **keys)
    plain, ids = plain_eagle(pair.target, tmp_path, algorithm)
    kept = check_drafts(pair, algorithm, tmp_path, depths, ids, plain, ahead=ahead)
    if "keeps" not in name:
        assert kept < 20, "the test needs drafts that are rejected"
    elif len(depths) < 10:
        assert kept > 5, "the test needs drafts that are kept"


def test_a_model_that_holds_its_own_draft_uses_it_without_being_told(tmp_path):
    target = make_target(tmp_path / "plain", "qwen2", layer_scale=0.3)
    mimo = make_mtp(tmp_path / "mimo", target, mimic=True)
    params = [
        SamplingParams(max_tokens=24, temperature=0.7 * (i % 2), seed=i, ignore_eos=True)
        for i in range(4)
    ]
    prompts = [[9 * i, 8, 7] * (1 + i) for i in range(4)]
    found = {}
    for path, algorithm in ((target, "NONE"), (mimo, "NONE"), (mimo, "MTP")):
        told = {"speculative_algorithm": "NONE"} if algorithm == "NONE" else {}
        keys = {"device": "cpu", "dtype": "float32", "num_pages": 64, **told}
        llm = LLM(str(path), speculative_adaptive=False, **keys)
        assert llm.config.speculative.speculative_algorithm == algorithm
        outputs = llm.generate(prompts, params)
        found[path.name, algorithm] = [output.token_ids for output in outputs]
        llm.shutdown()
    assert found["mimo", "MTP"] == found["mimo", "NONE"] == found["plain", "NONE"]
    assert sum(output.speculation.num_correct_drafts for output in outputs) > 5


@pytest.mark.parametrize(
    ("schedule", "token_map"),
    list(zip(SCHEDULES, (None, [7, 3, 200, 11, 12, 40, 99], None), strict=True)),
)
def test_medusas_heads_read_the_feature_of_the_token_before_the_newest(
    pair, tmp_path, schedule, token_map
):
    depths, ahead = SCHEDULES[schedule]
    rows = VOCAB if token_map is None else len(token_map)
    tensors = medusa_tensors(64, STEPS, 1, rows)
    maps = {} if token_map is None else {"token_map": torch.tensor(token_map)}
    write_checkpoint(tmp_path, {"model_type": "medusa"}, {**tensors, **maps})
    features = features_of(pair.target, FeatureCapture(None))

    def plain(text, count):
        last = features(text[: len(text) - count])[-1:]
        return plain_logits(tensors, torch.empty(0), last)[:count, 0]

    check_drafts(pair, "MEDUSA", tmp_path, depths, maps.get("token_map"), plain, ahead=ahead)
