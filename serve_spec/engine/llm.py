"""The offline API, with vLLM's names."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping
from typing import Any, cast

from serve_spec.config.flags import Parser, add_flags, add_model, load_flags
from serve_spec.config.root import Source
from serve_spec.core.errors import InvalidRequest
from serve_spec.core.request import Prompt, RequestOutput, SamplingParams
from serve_spec.core.sequence import Sequence
from serve_spec.engine.answers import Answer
from serve_spec.engine.arguments import PromptForm, Seeds, load_arguments, read_prompt
from serve_spec.engine.chat import Message, chat_token_ids, template_of
from serve_spec.engine.collector import MetricsCollector
from serve_spec.engine.inputs import sampling_defaults
from serve_spec.engine.llm_metrics import Metric, llm_metrics
from serve_spec.engine.output import OutputProcessor
from serve_spec.engine.tokenizer import Tokenizer


class LLM:
    """An engine in this process.

    model: a hub id, a checkpoint's folder, `asset:NAME`, a YAML file, a mapping or a
    `ServeSpecConfig`, also called `config`. arguments: vLLM's names, as on the command line
    (``LLM("asset:tiny", max_model_len=512, gpu_memory_utilization=0.8, enforce_eager=True,
    speculative_config={"num_speculative_tokens": 3})``), and keys of the configuration
    (``speculative_num_steps=3, device="cpu"``). seed: makes texts of prompts without a seed
    repeatable. Raises ConfigError for arguments that are unknown, wrong or not supported.
    """

    def __init__(
        self,
        model: Source | None = None,
        *,
        seed: int | None = None,
        **arguments: Any,
    ) -> None:
        from serve_spec.engine.build import build_engine  # torch takes seconds to import

        self.config = load_arguments(model, arguments)
        self._seeds = Seeds(seed)
        self.engine = build_engine(self.config)
        self.collector = MetricsCollector()
        self.engine.metrics = self.collector
        self._num_requests = 0

    def get_default_sampling_params(self) -> SamplingParams:
        """Return the parameters of prompts without any: the checkpoint's (generation_config)."""
        return SamplingParams(**sampling_defaults(self.config.model))

    def get_tokenizer(self) -> Tokenizer:
        """Return the tokenizer, which has `encode` and `decode`."""
        return self.engine.tokenizer

    def get_metrics(self) -> list[Metric]:
        """Return figures since the start under vLLM's names; see `engine.llm_metrics`."""
        engine, name = self.engine.snapshot(), self.config.model.names[0]
        return llm_metrics(engine, self.collector.snapshot(), name)

    def reset_prefix_cache(self) -> bool:
        """Drop all cached prefixes; return True, as vLLM does after success."""
        self.engine.flush_cache()
        return True

    def generate(
        self,
        prompts: str | Mapping[str, Any] | Iterable[PromptForm],
        sampling_params: SamplingParams | Iterable[SamplingParams] | None = None,
        *,
        use_tqdm: bool = False,
    ) -> list[RequestOutput]:
        """Complete prompts, in order; if one is refused, raise InvalidRequest and run none.

        Raises RequestFailed: a prompt had no answer, for example because its logits were NaN.

        sampling_params: one for all, or one per prompt; None: `get_default_sampling_params()`.
        use_tqdm: no effect; there is no progress bar.
        """
        is_one = isinstance(prompts, str | Mapping) or not isinstance(prompts, Iterable)
        batch = [read_prompt(prompt) for prompt in ([prompts] if is_one else prompts)]
        params = self._params_for(len(batch), sampling_params)
        sequences: list[Sequence] = []
        answers: list[Answer] = []
        places: dict[str, tuple[int, int]] = {}
        for prompt, wanted in zip(batch, params, strict=True):
            self._num_requests += 1
            request_id = f"offline-{self._num_requests}"
            first = len(sequences)
            for index, each in enumerate(wanted.each()):
                seeded = self._seeds.with_seed(each)
                name = request_id if index == 0 else f"{request_id}-{index}"
                sequences.append(self.engine.new_sequence(name, prompt, seeded))
                places[name] = len(answers), index
            ids = sequences[first].token_ids
            tokenizer = self.engine.tokenizer
            answers.append(Answer(request_id, prompt, ids, wanted.n, tokenizer))
        outputs = OutputProcessor(self.engine.tokenizer, self.engine.abort)
        try:
            for seq in sequences:
                self.engine.add(seq)
                outputs.add(seq)
            while self.engine.has_work:
                for delta in outputs.process(self.engine.step()):
                    place, index = places[delta.request_id]
                    answers[place].add(index, delta)
                self.engine.raise_failed()
        finally:  # after an interrupt, unfinished requests must not reach the next call
            for seq in sequences:
                self.engine.abort(seq.request_id)
        assert all(answer.finished for answer in answers), "the engine stopped before the texts"
        return [answer.output() for answer in answers]

    def chat(
        self,
        messages: Iterable[Message] | Iterable[Iterable[Message]],
        sampling_params: SamplingParams | Iterable[SamplingParams] | None = None,
        *,
        tools: Iterable[Mapping[str, Any]] | None = None,
        chat_template: str | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        use_tqdm: bool = False,
    ) -> list[RequestOutput]:
        """Answer one conversation, or several, rendered by the chat template; see `generate`.

        messages: dicts with `role` and `content`, as in the OpenAI API. tools: functions the
        template shows to the model; calls are part of the text. chat_template: a Jinja template
        instead of the model's. continue_final_message: go on with the last message instead of a
        new one. chat_template_kwargs: more variables of the template.
        """
        given = list(messages)
        many = bool(given) and not isinstance(given[0], Mapping)
        conversations = [list(each) for each in given] if many else [given]
        tokenizer = self.engine.tokenizer
        template = template_of(self.config.model, tokenizer, chat_template)
        if add_generation_prompt and continue_final_message:
            add_generation_prompt = False
        prompts: list[Prompt] = [
            chat_token_ids(
                tokenizer,
                template,
                cast(list[Message], conversation),
                tools=None if tools is None else list(tools),
                add_generation_prompt=add_generation_prompt,
                continue_final_message=continue_final_message,
                variables=chat_template_kwargs,
            )
            for conversation in conversations
        ]
        return self.generate(prompts, sampling_params, use_tqdm=use_tqdm)

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
        if not all(isinstance(some, SamplingParams) for some in each):
            fix = "give one SamplingParams, or one per prompt"
            raise InvalidRequest("sampling_params", f"<{type(params).__name__}>", fix)
        if len(each) != num_prompts:
            fix = f"give one SamplingParams, or {num_prompts}, one per prompt"
            raise InvalidRequest("sampling_params", f"<{len(each)} of them>", fix)
        return each


def command_parser() -> Parser:
    """Return the parser of `serve-spec generate`."""
    parser = Parser(prog="serve-spec generate", description="Complete prompts.")
    add = parser.add_argument
    add("prompts", nargs="+", help="one or more prompts")
    add_model(parser, positional=False, default="asset:tiny")
    add("--max-tokens", type=int, default=64, help="output tokens per prompt (default: 64)")
    add("--temperature", type=float, default=0.0, help="sampling temperature (default: 0)")
    add("--seed", type=int, default=0, help="seed of each prompt (default: 0)")
    add_flags(parser)
    return parser


def main(argv: list[str]) -> int:
    """Complete each prompt; print its text and speculation counts."""
    args = command_parser().parse_args(argv)
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
