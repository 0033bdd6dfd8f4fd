"""The offline API."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Iterable
from typing import Any

from serve_spec.config import ServeSpecConfig
from serve_spec.config.flags import add_flags, add_model, load_flags
from serve_spec.core.errors import InvalidRequest
from serve_spec.core.request import RequestOutput, SamplingParams, TokenDelta
from serve_spec.core.sequence import Sequence
from serve_spec.engine.collector import MetricsCollector
from serve_spec.engine.inputs import sampling_defaults
from serve_spec.engine.output import OutputProcessor


class LLM:
    """An engine in this process.

    config: a hub id, a checkpoint's folder, `asset:NAME`, a YAML file, a mapping or a
    `ServeSpecConfig`; keyword arguments override leaf keys, for example
    ``LLM("configs/tiny.yaml", speculative_num_steps=3, device="cpu")``.
    """

    def __init__(self, config: str | os.PathLike[str] | ServeSpecConfig, **overrides: Any) -> None:
        from serve_spec.engine.build import build_engine  # torch takes seconds to import

        self.config = ServeSpecConfig.load(config, **overrides).download()
        self.engine = build_engine(self.config)
        self.collector = MetricsCollector()
        self.engine.metrics = self.collector
        self._num_requests = 0

    def get_default_sampling_params(self) -> SamplingParams:
        """Return the parameters of prompts without any: the checkpoint's (generation_config)."""
        return SamplingParams(**sampling_defaults(self.config.model))

    def generate(
        self,
        prompts: str | Iterable[str | Iterable[int]],
        sampling_params: SamplingParams | Iterable[SamplingParams] | None = None,
    ) -> list[RequestOutput]:
        """Complete prompts, in order; if one is refused, raise InvalidRequest and run none.

        Raises RequestFailed: a prompt had no answer, for example because its logits were NaN.

        sampling_params: one for all, or one per prompt; None: `get_default_sampling_params()`.
        """
        batch = [prompts] if isinstance(prompts, str) else list(prompts)
        params = self._params_for(len(batch), sampling_params)
        sequences = []
        for prompt, p in zip(batch, params, strict=True):
            self._num_requests += 1
            ids = prompt if isinstance(prompt, str) else list(prompt)
            sequences.append(self.engine.new_sequence(f"offline-{self._num_requests}", ids, p))
        deltas: dict[str, list[TokenDelta]] = {seq.request_id: [] for seq in sequences}
        outputs = OutputProcessor(self.engine.tokenizer, self.engine.abort)
        try:
            for seq in sequences:
                self.engine.add(seq)
                outputs.add(seq)
            while self.engine.has_work:
                for delta in outputs.process(self.engine.step()):
                    deltas[delta.request_id].append(delta)
                self.engine.raise_failed()
        finally:  # after an interrupt, unfinished requests must not reach the next call
            for seq in sequences:
                self.engine.abort(seq.request_id)
        return [_finished(seq, deltas[seq.request_id]) for seq in sequences]

    def shutdown(self) -> None:
        """Free the model and end its processes; the object cannot be used afterwards."""
        self.engine.shutdown()
        del self.engine

    def _params_for(
        self, num_prompts: int, params: SamplingParams | Iterable[SamplingParams] | None
    ) -> list[SamplingParams]:
        if params is None or isinstance(params, SamplingParams):
            return [params or self.get_default_sampling_params()] * num_prompts
        each = list(params)
        if len(each) != num_prompts:
            fix = f"give one SamplingParams, or {num_prompts}, one per prompt"
            raise InvalidRequest("sampling_params", f"<{len(each)} of them>", fix)
        return each


def _finished(seq: Sequence, deltas: list[TokenDelta]) -> RequestOutput:
    last = deltas[-1]
    assert last.finish_reason is not None, "the engine stopped before the sequence ended"
    assert last.speculation is not None, "the last delta carries the statistics"
    logprobs = [token for delta in deltas for token in delta.logprobs or ()]
    return RequestOutput(
        request_id=seq.request_id,
        prompt_token_ids=tuple(seq.token_ids[: seq.num_prompt_tokens]),
        token_ids=tuple(token for delta in deltas for token in delta.token_ids),
        text="".join(delta.text for delta in deltas),
        finish_reason=last.finish_reason,
        speculation=last.speculation,
        logprobs=None if seq.params.logprobs is None else tuple(logprobs),
        prompt_logprobs=deltas[0].prompt_logprobs,
        num_cached_tokens=deltas[0].num_cached_tokens,
    )


def main(argv: list[str]) -> int:
    """Complete each prompt; print its text and speculation counts."""
    parser = argparse.ArgumentParser(prog="serve-spec generate", description="Complete prompts.")
    add = parser.add_argument
    add("prompts", nargs="+", help="one or more prompts")
    add_model(parser, positional=False, default="asset:tiny")
    add("--max-tokens", type=int, default=64, help="output tokens per prompt (default: 64)")
    add("--temperature", type=float, default=0.0, help="sampling temperature (default: 0)")
    add("--seed", type=int, default=0, help="seed of each prompt (default: 0)")
    add_flags(parser)
    args = parser.parse_args(argv)
    llm = LLM(load_flags(args))
    forced = llm.config.speculative.synthetic_acceptance
    if forced is not None:
        print(f"synthetic_acceptance={forced}: forced, the texts are not real", file=sys.stderr)
    params = SamplingParams(args.max_tokens, args.temperature, seed=args.seed)
    for prompt, output in zip(args.prompts, llm.generate(args.prompts, params), strict=True):
        print(prompt + output.text)
        stats = output.speculation
        print(
            f"[{len(output.token_ids)} tokens in {stats.num_rounds} rounds, "
            f"accept length {stats.accept_length:.2f}{' (forced)' if forced else ''}]\n"
        )
    llm.shutdown()
    return 0
