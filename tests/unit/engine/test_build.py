"""What an engine is built from, and refuses to be built from."""

import json
import logging
import math
import shutil

import pytest
import torch

from serve_spec import LLM, ServeSpecConfig
from serve_spec.config import ConfigError
from serve_spec.config.drafts import METHODS, DraftMethod
from serve_spec.core.caches import RecurrentCache
from serve_spec.core.errors import CheckpointError, InvalidRequest
from serve_spec.core.grammar import Grammar
from serve_spec.core.request import SamplingParams
from serve_spec.engine import build
from serve_spec.engine.check import check_checkpoints, resolved_values
from serve_spec.models.drafts.base import DraftOptions, Evidence
from serve_spec.models.drafts.loader import load_draft
from serve_spec.models.drafts.standalone import StandaloneFamily
from serve_spec.models.loader import load_target
from serve_spec.models.shape import DecoderShape
from serve_spec.parallel import worker_ranks
from serve_spec.parallel.group import SINGLE
from serve_spec.parallel.worker_ranks import RankLost
from tests.helpers.checkpoints import (
    VOCAB,
    make_eagle,
    make_eagle3,
    make_mtp,
    make_target,
    read_checkpoint,
    write_checkpoint,
)
from tests.helpers.engines import texts
from tests.helpers.paged import run_text
from tests.helpers.ranks import on_ranks


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ({"max_model_len": 513}, "max_model_len=513 .* max_position_embeddings=512"),
        ({"num_pages": 8}, "num_pages=8 .* hold 32 tokens, less than max_model_len=128"),
        (
            {"chunked_prefill_size": None, "max_num_batched_tokens": 64},
            "max_num_batched_tokens=64 is below max_model_len=128",
        ),
        (
            {"max_inter_token_ms": 0.001},
            r"^max_inter_token_ms=0.001: no step can hold it; .* takes [0-9.]+ ms here; raise it",
        ),
        ({"num_pages": 10**12}, r"^num_pages=10{12}: .* GiB; lower it"),
        ({"num_pages": None, "cpu_cache_gb": 1e9}, r"^cpu_cache_gb=10{9}\.0: .* GiB; lower it"),
        (
            {"algorithm": "MEDUSA", "num_steps": 5},
            "speculative_num_steps=5.*the draft supports at most 4",
        ),
    ],
)
def test_sizes_that_do_not_fit_are_refused_by_name(make_llm, overrides, message):
    with pytest.raises(ConfigError, match=message):  # a line, not a traceback, of every command
        make_llm(**overrides)


def test_gpus_that_are_not_there_are_refused_before_anything_starts(make_llm, monkeypatch):
    monkeypatch.setattr(build, "launch", None)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(ValueError, match=r"device='cuda': torch sees no GPU here; use .*'cpu'"):
        make_llm(device="cuda")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    message = r"tensor_parallel_size=2: torch sees 1 GPUs here; lower it, .*CUDA_VISIBLE_DEVICES"
    with pytest.raises(ValueError, match=message):
        make_llm(device="cuda", tensor_parallel_size=2)


def test_an_idle_engine_measures_what_the_start_could_not_in_ten_seconds_and_harms_no_prefix(
    make_llm, threads, budgets
):
    prompts, params = [[7] * 40, [5, 6] * 20], SamplingParams(max_tokens=20, seed=5)
    expected = texts(make_llm().generate(prompts, params))
    llm = make_llm("EAGLE3", 3, speculative_adaptive=True, max_num_seqs=2, tensor_parallel_size=2)
    engine = llm.engine
    assert budgets == [10.0]
    shown = engine.snapshot()
    assert (shown["strategy"], shown["fallback"], shown["speculative_num_steps"]) == (
        "ema",
        None,
        3,
    )
    assert shown["costs"] == {"state": "missing", "detail": "RuntimeError: the device is lost"}
    assert texts(llm.generate(prompts, params)) == expected
    num_rounds = 0
    while engine.idle_wait_s() < math.inf:
        engine.use_idle_time()
        engine.scheduler.queue.check_integrity()
        num_rounds += 1
        if num_rounds == 5:
            assert texts(llm.generate(prompts, params)) == expected
            assert engine.controller.snapshot()["strategy"] == "ema"
    assert num_rounds > 10
    shown = engine.snapshot()
    assert (shown["strategy"], shown["costs"]["state"]) == ("goodput", "measured")
    hits = engine.counters.num_prefix_hit_tokens
    assert texts(llm.generate(prompts, params)) == expected
    assert engine.counters.num_prefix_hit_tokens - hits == 2 * 36, "no known page was written to"
    llm.shutdown()


def test_pages_to_measure_on_are_free_ones_and_then_the_oldest_prefixes(make_llm):
    llm = make_llm(num_pages=40)
    llm.generate([[7] * 41], SamplingParams(max_tokens=1))
    cache = llm.engine.scheduler.cache
    known = {page for page, _, _ in cache.tree.page_texts()}
    assert len(known) == 10
    free = cache.unheld_pages(30)
    assert not known & set(free)
    assert cache.unheld_pages(30) == free
    assert len(cache.tree) == 10
    assert len(set(cache.unheld_pages(36))) == 36
    assert len(cache.tree) == 4


def with_nan(source, copy, name):
    """A copy of a checkpoint in which one number is not one."""
    settings, tensors = read_checkpoint(shutil.copytree(source, copy))
    tensors[name][-1].fill_(torch.nan)
    return write_checkpoint(copy, settings, tensors)


EMBEDDING, PROJECTION = "model.embed_tokens.weight", "model.layers.2.mlp.down_proj.weight"
HEAD = {"algorithm": "EAGLE3", "num_steps": 2}


@pytest.mark.parametrize(
    ("name", "overrides"),
    [
        (EMBEDDING, {}),
        (PROJECTION, {"tensor_parallel_size": 2}),
        (PROJECTION, {**HEAD, "synthetic_acceptance": 2.0}),
        (PROJECTION, {**HEAD, "rejection_sample_method": "standard"}),
    ],
)
def test_a_target_whose_logits_are_nan_is_refused_at_load(
    make_llm, threads, pair, tmp_path, monkeypatch, name, overrides
):
    monkeypatch.setattr(worker_ranks, "_NOTICE_S", 1.0)
    broken = with_nan(pair.target, tmp_path / "broken", name)
    message = "(broken|rank 1 .*): target model produced NaN logits; check the checkpoint or use"
    with pytest.raises((CheckpointError, RankLost), match=message):
        make_llm(path=str(broken), **overrides)


def test_a_draft_whose_logits_are_nan_is_named_and_serves_nothing(make_llm, pair, tmp_path, caplog):
    broken = with_nan(pair.heads["EAGLE3"], tmp_path / "broken", "lm_head.weight")
    llm = make_llm("EAGLE3", 3, speculative_draft_model_path=str(broken), max_num_seqs=4)
    (warned,) = [r.getMessage() for r in caplog.records if "NaN" in r.getMessage()]
    assert warned.startswith(f"{broken}: draft model produced NaN logits")
    prompts, params = [[1, 2, 3]], SamplingParams(seed=5)
    assert texts(llm.generate(prompts, params)) == texts(make_llm().generate(prompts, params))


def test_a_start_names_adaptive_keys_that_have_no_effect(make_llm, tmp_path, caplog):
    file = tmp_path / "slots.json"
    file.write_text('{"1": {"candidate_steps": [3], "ema_alpha": 0.5}}')
    make_llm("EAGLE3", 3, speculative_adaptive_config=file)
    (warned,) = [r.getMessage() for r in caplog.records if r.levelno >= logging.WARNING]
    assert warned.endswith("a fixed depth ignores candidate_steps, ema_alpha")


def test_sound_models_are_not_warned_of_and_the_check_leaves_nothing_behind(make_llm, caplog):
    shown = make_llm("EAGLE3", 3).engine.snapshot()
    assert not [r for r in caplog.records if r.levelno >= logging.WARNING]
    assert shown["counters"]["steps"] == shown["prefix_cache"]["pages"] == 0
    assert shown["kv"]["free_pages"] == shown["kv"]["total_pages"]


def test_an_engine_shows_the_reason_of_its_last_decision_while_it_has_requests(make_llm):
    engine = make_llm("EAGLE3", 3).engine
    assert engine.snapshot()["last_reason"] == "idle"
    engine.add(engine.new_sequence("one", [5, 6, 7], SamplingParams(max_tokens=20)))
    seen = set()
    while engine.has_work:
        engine.step()
        seen.add(engine.has_work and engine.snapshot()["last_reason"])
    assert seen == {"static", False}
    shown = engine.snapshot()
    assert (shown["num_running"], shown["last_reason"]) == (0, "idle")
    assert shown["decision"].startswith("depth 3: ")


def test_a_target_with_recurrent_state_is_refused_before_its_weights_are_read(
    make_llm, monkeypatch
):
    recurrent = RecurrentCache(state=(2, 8, 8), conv=(16, 3), input_width=20)
    monkeypatch.setattr(DecoderShape, "caches", (recurrent,) * 6)
    monkeypatch.setattr(build, "load_models", None)
    with pytest.raises(ValueError, match="layer 0 keeps recurrent state: not supported; use"):
        make_llm()


def test_a_tokenizer_of_another_model_is_refused(pair, tmp_path):
    target = make_target(tmp_path / "target")
    path = target / "tokenizer.json"
    tokenizer = json.loads(path.read_text())
    tokenizer["model"]["vocab"] |= {f"<{number}>": number for number in range(259, 299)}
    path.write_text(json.dumps(tokenizer))
    with pytest.raises(CheckpointError, match=r"tokenizer\.json has 299 tokens"):
        LLM({"model": {"path": str(target), "device": "cpu"}})


def test_added_tokens_without_logits_are_refused_in_prompts_and_never_generated(tmp_path):
    target = make_target(tmp_path / "target")
    path = target / "tokenizer.json"
    tokenizer = json.loads(path.read_text())
    special = tokenizer["added_tokens"][0]
    for number in range(259, VOCAB + 1):
        content = "<more>" if number == VOCAB else f"<{number}>"
        tokenizer["added_tokens"].append({**special, "id": number, "content": content})
    path.write_text(json.dumps(tokenizer))
    llm = LLM(str(target), device="cpu", max_model_len=64, num_pages=16)
    with pytest.raises(InvalidRequest, match=rf"in \[0, {VOCAB}\), but '<more>' is {VOCAB} in the"):
        llm.generate("a<more>")
    for token in (VOCAB, VOCAB + 1, 2**40, -1):
        with pytest.raises(InvalidRequest, match=rf"token ids must be in \[0, {VOCAB}\)"):
            llm.generate([[1, token]])
    wanted = Grammar.regex("(<more>){2}")
    (answer,) = llm.generate("a", SamplingParams(max_tokens=40, grammar=wanted))
    assert answer.text == "<more><more>"
    llm.shutdown()


PROMPTS = [[5, 6, 7, 5], [9, 8, 9, 8, 9]]
GREEDY = SamplingParams(max_tokens=13, temperature=0.0, ignore_eos=True)


class SecondFamily(StandaloneFamily):
    """The target once more."""

    def detect(self, config, shapes):
        return Evidence(["norm.weight"])


def test_prompts_without_parameters_take_those_of_generation_config(pair, tmp_path):
    target = shutil.copytree(pair.target, tmp_path / "target")
    file = target / "generation_config.json"
    file.write_text('{"temperature": 0, "top_k": 9, "max_new_tokens": 5}')
    keys = {"device": "cpu", "max_model_len": 64, "num_pages": 16}
    llm = LLM(str(target), **keys)
    assert llm.get_default_sampling_params() == SamplingParams(temperature=0, top_k=9, max_tokens=5)
    assert len(llm.generate("a", None)[0].token_ids) == 5
    llm.shutdown()
    file.write_text('{"temperature": -1}')
    with pytest.raises(CheckpointError, match=r"generation_config\.json: temperature=-1"):
        LLM(str(target), **keys)
    LLM(str(target), **keys, generation_config="none").shutdown()


def test_a_speculators_checkpoint_as_the_model_drafts_for_its_verifier(make_llm, pair, tmp_path):
    config, tensors = read_checkpoint(pair.heads["EAGLE3"])
    head = write_checkpoint(
        tmp_path,
        {
            "architectures": ["Eagle3Speculator"],
            "speculators_model_type": "eagle3",
            "norm_before_residual": False,
            "draft_vocab_size": config["draft_vocab_size"],
            "transformer_layer_config": config,
            "speculators_config": {"verifier": {"name_or_path": str(pair.target)}},
        },
        {name.replace("midlayer.", "layers.0."): tensor for name, tensor in tensors.items()},
    )
    sizes = {"max_model_len": 128, "num_pages": 64}
    llm = LLM(str(head), device="cpu", speculative_adaptive=False, **sizes)
    outputs = llm.generate(PROMPTS, GREEDY)
    assert texts(outputs) == texts(make_llm().generate(PROMPTS, GREEDY))
    assert sum(output.speculation.num_correct_drafts for output in outputs) > 0
    llm.shutdown()


def test_a_model_that_is_registered_drafts(make_llm, pair, monkeypatch):
    monkeypatch.setitem(METHODS, "SECOND", DraftMethod("SECOND", f"{__name__}:SecondFamily"))
    folder = str(pair.target)
    llm = make_llm("SECOND", 3, speculative_draft_model_path=folder)
    outputs = llm.generate(PROMPTS, GREEDY)
    assert texts(outputs) == texts(make_llm().generate(PROMPTS, GREEDY))
    for output in outputs:
        assert output.speculation.num_correct_drafts == output.speculation.num_draft_tokens > 0


PARAMS = SamplingParams(max_tokens=20, temperature=0.8, seed=3, ignore_eos=True)
SIZES = {"num_hidden_layers": 1, "hidden_act": "silu", "num_attention_heads": 4}
HEADS = {
    "eagle without a bias": ("EAGLE", make_eagle, {"fc_bias": False, "bias": False}),
    "eagle of two layers": ("EAGLE", make_eagle, {"num_layers": 2, "num_hidden_layers": 2}),
    "eagle3 with its own ids": ("EAGLE3", make_eagle3, {"draft_vocab": 100}),
    "thin eagle3": ("EAGLE3", make_eagle3, {"hidden_size": 16, "own_embedding": True}),
    "mtp": ("MTP", make_mtp, {"rope_scaling": None}),
}


@pytest.fixture
def target(tmp_path):
    folder = make_target(tmp_path / "target", "qwen2", layers=6, hidden=32)
    (folder / "model.safetensors").unlink()
    return folder


def without_weights(folder):
    for pattern in ("*.bin", "*.safetensors"):
        for file in folder.glob(pattern):
            file.unlink()
    return folder


def shapes_of(model):
    return {name: tuple(tensor.shape) for name, tensor in model.tensors().items()}


def engine(target, **keys):
    sizes = {"max_model_len": 64, "num_pages": 32, "device": "cpu", "speculative_num_steps": 3}
    return LLM(str(target), load_format="dummy", speculative_adaptive=False, **sizes, **keys)


@pytest.mark.parametrize("name", HEADS)
def test_a_dummy_head_has_the_tensors_of_a_real_one(tmp_path, name):
    algorithm, make, config = HEADS[name]
    folder = make_target(tmp_path / "target", hidden=32)
    head = make(tmp_path / "head", folder, **config)
    target = load_target(folder, torch.float32)
    stored = load_draft(head, target, algorithm)
    dummy = load_draft(without_weights(head), target, algorithm, DraftOptions(load_format="dummy"))
    assert shapes_of(dummy) == shapes_of(stored)
    assert (dummy.target_ids is None) == (stored.target_ids is None)


@pytest.mark.parametrize(
    ("algorithm", "config"),
    [
        ("EAGLE", SIZES),
        ("EAGLE3", {**SIZES, "norm_before_fc": True, "model_type": "qwen3", "head_dim": 8}),
        ("MEDUSA", {"medusa_num_heads": 3, "medusa_num_layers": 2}),
        ("STANDALONE", None),
    ],
)
def test_dummy_weights_serve_the_same_text_with_drafts_and_without(
    target, tmp_path, algorithm, config
):
    draft = target
    if config is not None:
        draft = tmp_path / "draft"
        draft.mkdir()
        own = {"hidden_size": 32, "intermediate_size": 64, "vocab_size": VOCAB, **config}
        (draft / "config.json").write_text(json.dumps(own))
    plain = engine(target)
    drafting = engine(
        target, speculative_algorithm=algorithm, speculative_draft_model_path=str(draft)
    )
    assert texts(drafting.generate(PROMPTS, PARAMS)) == texts(plain.generate(PROMPTS, PARAMS))
    assert drafting.generate(PROMPTS, PARAMS)[0].speculation.num_draft_tokens > 0
    for llm in (plain, drafting):
        llm.shutdown()


@pytest.mark.parametrize(
    ("own", "message"),
    [
        ({"vocab_size": VOCAB + 1}, f"vocab_size={VOCAB + 1}, but the target's is {VOCAB}"),
        ({"eagle_aux_hidden_state_layer_ids": [1, 3, 9]}, r"inputs of layers \[2, 4, 10\]"),
    ],
)
def test_a_dummy_head_that_does_not_fit_is_refused_before_anything_starts(
    target, tmp_path, own, message
):
    sizes = {"hidden_size": 32, "intermediate_size": 64, "vocab_size": VOCAB, **SIZES, **own}
    (tmp_path / "config.json").write_text(json.dumps(sizes))
    config = ServeSpecConfig.load(
        str(target),
        load_format="dummy",
        speculative_algorithm="EAGLE3",
        speculative_draft_model_path=str(tmp_path),
    )
    with pytest.raises(CheckpointError, match=message):
        check_checkpoints(config)


def test_a_cost_table_that_is_none_is_refused_before_anything_starts(tmp_path):
    (tmp_path / "costs.json").write_text("a: [1")
    keys = {"speculative_cost_table": str(tmp_path / "costs.json")}
    with pytest.raises(ConfigError, match=r"costs\.json: not valid JSON: .* delete the file"):
        check_checkpoints(ServeSpecConfig.load("asset:tiny", **keys))


def test_resolved_values_are_those_of_the_models_that_are_loaded():
    config = ServeSpecConfig.load(
        "asset:tiny", device="cpu", max_model_len=128, num_pages=40, page_size=8
    )
    loaded, values = build.load_models(config, SINGLE), resolved_values(config)
    assert values["context"].split()[0] == str(loaded.target.max_model_len)
    assert values["pages"] == f"{loaded.num_pages} of 8 tokens"
    assert values["device"] == loaded.device.type
    assert f"torch.{values['dtype']}" == str(loaded.target.dtype)
    assert f"torch.{values['draft format'].split()[-1]}" == str(loaded.head.dtype)
    assert values["depths"].startswith("0, 1, ")


def test_an_fp8_cache_has_twice_the_pages_in_the_same_memory_as_sixteen_bits(target):
    """Four times those of float32."""
    keys = {"device": "cpu", "load_format": "dummy", "cpu_cache_gb": 0.01}
    num_pages = {}
    for dtype in ("float32", "bfloat16"):
        for stored_in in ("auto", dtype, "fp8"):
            settings = {"dtype": dtype, "kv_cache_dtype": stored_in}
            config = ServeSpecConfig.load(str(target), **keys, **settings)
            num_pages[dtype, stored_in] = build.load_models(config, SINGLE).num_pages
            told = resolved_values(config).get("KV cache")
            assert told == ("float8_e4m3fn" if stored_in == "fp8" else None)
    fp8 = num_pages["float32", "fp8"]
    assert num_pages["bfloat16", "fp8"] == fp8
    assert {num_pages["float32", name] for name in ("auto", "float32")} == {fp8 // 4}
    assert {num_pages["bfloat16", name] for name in ("auto", "bfloat16")} == {fp8 // 2}


def test_the_draft_format_of_a_gpu_on_another_machine_is_left_open():
    assert not torch.cuda.is_available()
    values = resolved_values(ServeSpecConfig.load("asset:tiny", device="cuda"))
    assert values["draft format"] == "as the GPU computes fastest"


def test_speculation_that_is_off_is_told_with_what_to_try(target):
    values = resolved_values(ServeSpecConfig.load(str(target), load_format="dummy", device="cpu"))
    assert values["speculation"] == "off: no draft; try --speculative-algorithm NGRAM"
    assert not {"depths", "experts"} & values.keys()


def test_the_experts_of_a_mixture_are_told(tmp_path):
    folder = make_target(tmp_path, "qwen3_moe", hidden=32, layers=2)
    values = resolved_values(ServeSpecConfig.load(str(folder), device="cpu"))
    assert values["experts"] == "2 of 6 for every token"


@pytest.mark.parametrize("family", ["llama3", "gpt_oss"])
def test_every_rank_has_its_part_of_the_same_dummy_weights(tmp_path, family):
    folder = make_target(tmp_path, family, layers=2, hidden=32)
    ids = torch.arange(20)

    def run(parallel):
        model = load_target(folder, torch.float32, parallel=parallel, load_format="dummy")
        return run_text(model, ids)[0]

    whole = run(SINGLE)
    for part in on_ranks(2, run):
        torch.testing.assert_close(part, whole, rtol=1e-4, atol=1e-4)


def test_only_safetensors_are_read_where_they_are_asked_for(tmp_path):
    folder = make_target(tmp_path / "target", hidden=32)
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")
    with pytest.raises(CheckpointError, match=r"load_format='safetensors': .*'auto'"):
        LLM(str(folder), load_format="safetensors", device="cpu")
