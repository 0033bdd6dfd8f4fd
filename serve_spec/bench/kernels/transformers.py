"""Speed of transformers' `generate` over the same weights, plain and assisted, beside ours."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

import torch

from serve_spec.adaptive import AdaptiveController
from serve_spec.bench.kernels.setting import LeftOut, Row, Section, Setting
from serve_spec.bench.workload import held_out_prompts
from serve_spec.core.request import SamplingParams
from serve_spec.models import load_target
from serve_spec.models.expansion import find_base

_WARM_UP_TOKENS = 16

Generate = Callable[[list[int], int], list[int]]
"""Prompt and number of new tokens to the new tokens, greedy."""


def transformers(setting: Setting) -> Section:
    """Tokens per second of one request at a time, prompt included: theirs, ours off and on."""
    model, assistant = _models(setting)
    steps = max(setting.controller.candidate_steps)
    arms: dict[str, Generate] = {
        "transformers, plain": _theirs(setting, model, None),
        "serve_spec, off": _ours(setting, setting.fixed(0)),
    }
    if steps:
        arms[f"serve_spec, K={steps}"] = _ours(setting, setting.fixed(steps))
    left_out = ["transformers, assisted: no assistant is given"]
    if assistant is not None:
        arms["transformers, assisted"] = _theirs(setting, model, assistant)
        left_out = []
    rows = _rows(setting, arms)
    plain = rows[0]["tokens_per_second"]
    rows = [{**row, "over_plain": row["tokens_per_second"] / plain} for row in rows]
    return Section(rows, left_out=left_out)


def _models(setting: Setting) -> tuple[Any, Any]:
    """The target and its assistant, if one is given, as transformers computes them."""
    from serve_spec.bench.hf_model import as_transformers  # here: it takes seconds to import

    target = setting.target
    try:
        model = as_transformers(target)
    except ValueError as error:
        raise LeftOut(str(error)) from error
    if setting.assistant is None:
        return model, None
    small = load_target(
        find_base(setting.assistant, Path.cwd()),
        setting.engine.worker.dtype,
        setting.device,
        target.max_model_len,
    )
    return model, as_transformers(small, target.shape.vocab_size)


def _rows(setting: Setting, arms: dict[str, Generate]) -> list[Row]:
    sizes = setting.sizes
    prompts = held_out_prompts(
        setting.engine.tokenizer.encode, count=sizes.repetitions, num_tokens=sizes.prompt_tokens
    )
    seconds: dict[str, list[float]] = {name: [] for name in arms}
    texts: dict[str, list[list[int]]] = {name: [] for name in arms}
    for name, generate in arms.items():
        generate(prompts[0], _WARM_UP_TOKENS)
        setting.say(f"{name}: warm")
    for prompt in prompts:
        for name, generate in arms.items():
            started = time.perf_counter()
            texts[name].append(generate(prompt, sizes.output_tokens))
            seconds[name].append(time.perf_counter() - started)
            setting.say(f"{name}: {seconds[name][-1]:.2f} s")
    expected = next(iter(texts.values()))
    return [
        {
            "arm": name,
            "tokens_per_second": sizes.output_tokens / median(seconds[name]),
            "seconds": [round(value, 3) for value in seconds[name]],
            "same_texts": sum(a == b for a, b in zip(texts[name], expected, strict=True)),
            "num_texts": len(prompts),
        }
        for name in arms
    ]


def _theirs(setting: Setting, model: Any, assistant: Any) -> Generate:
    how: dict[str, Any] = {"do_sample": False, "eos_token_id": None}
    if assistant is not None:
        how["assistant_model"] = assistant

    @torch.inference_mode()
    def generate(prompt: list[int], num_tokens: int) -> list[int]:
        ids = torch.tensor([prompt], device=setting.device)
        mask = torch.ones_like(ids)
        out = model.generate(ids, attention_mask=mask, max_new_tokens=num_tokens, **how)
        new: list[int] = out[0, len(prompt) :].tolist()
        return new

    return generate


def _ours(setting: Setting, controller: AdaptiveController) -> Generate:
    def generate(prompt: list[int], num_tokens: int) -> list[int]:
        params = SamplingParams(max_tokens=num_tokens, temperature=0.0, ignore_eos=True)
        before, setting.engine.controller = setting.engine.controller, controller
        try:
            return list(setting.llm.generate([prompt], params)[0].token_ids)
        finally:
            setting.engine.controller = before

    return generate
