"""What an engine refuses to be built from: named, with the way out."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from serve_spec import LLM
from serve_spec.core.errors import CheckpointError
from serve_spec.core.request import SamplingParams
from serve_spec.engine import build
from tests.helpers.checkpoints import make_eagle3, make_target
from tests.helpers.engines import MakeLLM, Pair, texts


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ({"max_model_len": 513}, "max_model_len=513 .* max_position_embeddings=512"),
        ({"num_pages": 8}, "num_pages=8 .* hold 32 tokens, less than max_model_len=128"),
        (
            {"chunked_prefill": False, "max_num_batched_tokens": 64},
            "max_num_batched_tokens=64 is below max_model_len=128",
        ),
        ({"speculative_num_step": 3}, "speculative_num_steps"),
    ],
)
def test_sizes_that_do_not_fit_are_refused_by_name(
    make_llm: MakeLLM, overrides: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        make_llm(**overrides)


def test_gpus_that_are_not_there_are_refused_before_anything_starts(
    make_llm: MakeLLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(build, "launch", None)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(ValueError, match=r"device='cuda': torch sees no GPU here; use .*'cpu'"):
        make_llm(device="cuda")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    told = r"tensor_parallel_size=2: torch sees 1 GPUs here; lower it, .*CUDA_VISIBLE_DEVICES"
    with pytest.raises(ValueError, match=told):
        make_llm(device="cuda", tensor_parallel_size=2)


def test_costs_are_measured_for_ten_seconds_at_most_and_without_any_the_engine_decodes_plainly(
    make_llm: MakeLLM, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    budgets = []

    def fails(*args: Any, budget_s: float, **sizes: Any) -> None:
        budgets.append(budget_s)
        raise RuntimeError("the device is lost")

    monkeypatch.setenv("SERVE_SPEC_CACHE", str(tmp_path))
    monkeypatch.setattr(build, "measure_costs", fails)
    llm = make_llm("EAGLE3", 3, speculative_adaptive=True)
    assert budgets == [10.0]
    prompts, params = [[1, 2, 3]], SamplingParams(seed=5)
    assert texts(llm.generate(prompts, params)) == texts(make_llm().generate(prompts, params))
    shown = llm.engine.snapshot()
    assert shown["fallback"] == "there is no cost table"
    assert shown["speculative_num_steps"] == 0


def test_a_draft_of_another_hidden_size_or_vocabulary_is_refused(
    make_llm: MakeLLM, pair: Pair, tmp_path: Path
) -> None:
    for name, shape in (("hidden", {"hidden": 32}), ("vocabulary", {"vocab": 300})):
        other = make_target(tmp_path / name, **shape)
        head = make_eagle3(tmp_path / f"{name}-head", other)
        with pytest.raises(CheckpointError, match=r"hidden_size|vocab_size"):
            make_llm("EAGLE3", 3, speculative_draft_model_path=str(head))


def test_a_tokenizer_of_another_model_is_refused(pair: Pair, tmp_path: Path) -> None:
    target = make_target(tmp_path / "target")
    path = target / "tokenizer.json"
    tokenizer = json.loads(path.read_text())
    for number in range(40):
        added = {**tokenizer["added_tokens"][0], "id": 259 + number, "content": f"<{number}>"}
        tokenizer["added_tokens"].append(added)
    path.write_text(json.dumps(tokenizer))
    with pytest.raises(CheckpointError, match=r"tokenizer\.json has 299 tokens"):
        LLM({"model": {"path": str(target), "device": "cpu"}})


def test_a_missing_or_broken_tokenizer_is_refused(tmp_path: Path) -> None:
    target = make_target(tmp_path / "target")
    (target / "tokenizer.json").write_text("{")
    with pytest.raises(CheckpointError, match=r"tokenizer\.json can not be read"):
        LLM({"model": {"path": str(target), "device": "cpu"}})
    (target / "tokenizer.json").unlink()
    with pytest.raises(CheckpointError, match=r"tokenizer\.json is missing"):
        LLM({"model": {"path": str(target), "device": "cpu"}})
