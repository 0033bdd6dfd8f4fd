"""`LLM` and `AsyncLLM` take and give what vLLM's do."""

import asyncio
import os
import signal

import pytest

from serve_spec import LLM, AsyncLLM, RequestOutputKind, SamplingParams, StructuredOutputsParams
from serve_spec.config import ConfigError
from serve_spec.core.errors import CheckpointError, InvalidRequest
from serve_spec.engine.arguments import load_arguments
from serve_spec.engine.llm_metrics import Vector

PROMPT = [10, 20, 30]
LONG = 500
"""Tokens of a text that does not end before it is left."""
RENDERED = "<system>be brief\n<user>a\nb\n<assistant>"
"""What the template of the pair makes of the conversation below."""
TEMPLATE = (
    "{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}"
    "{% if tools %}({{ tools[0].function.name }}){% endif %}"
    "{% if add_generation_prompt %}[assistant]{% endif %}{{ suffix }}"
)


@pytest.fixture(scope="module")
def llm(make_llm):
    made = make_llm("EAGLE3", 3)
    yield made
    made.shutdown()


def params(**changes):
    return SamplingParams(**{"max_tokens": 12, "seed": 3, "ignore_eos": True, **changes})


def arguments(pair, **keys):
    """Arguments by vLLM's names for an engine of the pair."""
    return {
        "device": "cpu",
        "dtype": "float",
        "max_model_len": 128,
        "block_size": 4,
        "num_pages": 512,
        "speculative_config": {
            "method": "eagle3", "model": str(pair.heads["EAGLE3"]), "num_speculative_tokens": 3,
        },
        "speculative_draft_dtype": "float32",
        "speculative_adaptive": False,
        **keys,
    }  # fmt: skip


def test_arguments_have_vllm_s_names(pair):
    given = arguments(pair, gpu_memory_utilization=0.5, enforce_eager=True, tensor_parallel_size=2)
    neutral = {"trust_remote_code": True, "pipeline_parallel_size": 1, "enable_lora": False}
    config = load_arguments(str(pair.target), given | neutral)
    assert config.model.dtype == "float32"
    assert (config.model.tensor_parallel_size, config.model.cuda_graphs) == (2, False)
    assert (config.cache.page_size, config.cache.memory_fraction) == (4, 0.5)
    assert config.speculative.speculative_algorithm == "EAGLE3"
    assert load_arguments(None, {"config": "asset:tiny"}).model.path == "asset:tiny/target"


@pytest.mark.parametrize(
    ("given", "complaint"),
    [
        ({"enable_lora": True}, "^enable_lora=True: not supported; merge the adapter"),
        ({"pipeline_parallel_size": 2}, "pipeline_parallel_size=2: .*use tensor_parallel_size"),
        ({"max_model_length": 5}, "max_model_length: unknown key; did you mean max_model_len"),
        ({"gpu_memory_utilization": 2.0}, "^gpu_memory_utilization=2.0: "),
        ({"speculative_config": {"depth": 3}}, "speculative_config depth: not supported; use meth"),
        ({"speculative_config": {"num_speculative_tokens": -1}}, "^speculative_config num_spec"),
        ({"config": "asset:smollm2"}, "^model='asset:tiny': config='asset:smollm2' is given too"),
        ({"seed": "a"}, "seed='a': not an integer"),
    ],
)
def test_arguments_that_mean_something_else_are_refused_by_the_name_given(given, complaint):
    with pytest.raises(ConfigError, match=complaint):
        LLM("asset:tiny", **given)


def test_a_model_has_to_be_given():
    with pytest.raises(ConfigError, match=r"^model: missing; give"):
        LLM()


def test_outputs_have_vllm_s_fields_beside_ours(llm):
    (out,) = llm.generate("abc", params(logprobs=2, prompt_logprobs=0, temperature=0.0))
    (text,) = out.outputs
    assert (out.prompt, out.finished, text.finished()) == ("abc", True, True)
    assert out.prompt_token_ids == tuple(llm.get_tokenizer().encode("abc"))
    assert (text.index, text.text, text.token_ids) == (0, out.text, out.token_ids)
    assert text.finish_reason == out.finish_reason == "length"
    assert out.prompt_logprobs[0] is None
    assert len(out.prompt_logprobs) == len(out.prompt_token_ids)
    for token_id, ours, theirs in zip(text.token_ids, out.logprobs, text.logprobs, strict=True):
        own = theirs[token_id]
        assert (own.logprob, own.rank) == (ours.logprob, 1)
        assert own.decoded_token == llm.get_tokenizer().decode([token_id])
        assert {rank for _, rank, _ in theirs.values()} == {1, 2}
    assert text.cumulative_logprob == sum(each.logprob for each in out.logprobs)
    (out,) = llm.generate([PROMPT], params())
    assert (out.prompt, out.outputs[0].logprobs, out.outputs[0].cumulative_logprob) == (None,) * 3


def test_prompts_have_all_forms_of_vllm(llm):
    ids = llm.get_tokenizer().encode("abc")
    prompts = ["abc", ids, {"prompt": "abc"}, {"prompt_token_ids": ids}]
    texts = {out.text for out in llm.generate(prompts, params())}
    assert texts == {llm.generate({"prompt": "abc"}, params(), use_tqdm=False)[0].text}
    for wrong in ([{"multi_modal_data": 1, "prompt": "a"}], [{}], [5], [[1.5]], 5, None):
        with pytest.raises(InvalidRequest, match=r"^prompts.*: .*give a text, token ids"):
            llm.generate(wrong)
    for wrong in ({"max_tokens": 3}, [{"max_tokens": 3}], [params(), params()]):
        with pytest.raises(
            InvalidRequest, match=r"^sampling_params='<.*>': give one SamplingParams"
        ):
            llm.generate(["abc"], wrong)


def test_several_texts_of_a_prompt_are_those_of_their_seeds(llm):
    wanted = params(n=3, prompt_logprobs=1, temperature=1.0)
    several, one = llm.generate([PROMPT, [7, 8]], [wanted, params(temperature=1.0)])
    assert [text.index for text in several.outputs] == [0, 1, 2]
    assert len({text.token_ids for text in several.outputs}) == 3
    assert len(one.outputs) == 1
    for each, text in zip(wanted.each(), several.outputs, strict=True):
        assert llm.generate([PROMPT], each)[0].token_ids == text.token_ids
    assert len(several.prompt_logprobs) == len(PROMPT)


def test_an_engine_with_a_seed_repeats_its_texts(pair):
    def texts(seed):
        llm = LLM(str(pair.target), seed=seed, **arguments(pair))
        found = llm.generate([PROMPT, PROMPT], params(seed=None, temperature=1.0))
        llm.shutdown()
        return [out.token_ids for out in found]

    first = texts(1)
    assert first == texts(1) != texts(2)
    assert first[0] != first[1]


@pytest.mark.parametrize("form", [StructuredOutputsParams, dict])
def test_structured_outputs_become_a_grammar(llm, form):
    wanted = params(structured_outputs=form(choice=["yes", "no"]), ignore_eos=False)
    assert llm.generate([PROMPT], wanted)[0].text in ("yes", "no")


def test_a_prompt_keeps_its_last_tokens(llm):
    long = [*range(200)]
    kept = llm.generate([long, "x" * 500], params(truncate_prompt_tokens=3, temperature=0.0))
    assert [len(out.prompt_token_ids) for out in kept] == [3, 3]
    assert kept[0].prompt_token_ids == (197, 198, 199)
    most = llm.generate([long], params(truncate_prompt_tokens=-1))[0]
    assert len(most.prompt_token_ids) == 128 - 12
    with pytest.raises(InvalidRequest, match=r"prompt=.*shorten it"):
        llm.generate([long], params())


def test_tokens_come_without_text_if_none_is_wanted(llm):
    (plain,), (out,) = (llm.generate([PROMPT], params(detokenize=on)) for on in (True, False))
    assert (out.text, out.token_ids) == ("", plain.token_ids)


def test_a_chat_is_rendered_by_a_template(llm):
    messages = [
        {"role": "system", "content": "be brief"},
        {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]},
    ]
    tools = [{"type": "function", "function": {"name": "find", "parameters": {}}}]
    own, tool, after, two = (
        llm.chat(messages, params(), chat_template=TEMPLATE),
        llm.chat(messages, params(), chat_template=TEMPLATE, tools=tools),
        llm.chat(
            [*messages, {"role": "assistant", "content": "so"}], params(),
            chat_template=TEMPLATE, continue_final_message=True,
            chat_template_kwargs={"suffix": "!"},
        ),
        llm.chat([messages, messages], params()),
    )  # fmt: skip
    decode = llm.get_tokenizer().decode
    shown = [decode(list(out[0].prompt_token_ids)) for out in (own, tool, after)]
    assert shown == [
        "[system]be brief[user]a\nb[assistant]",
        "[system]be brief[user]a\nb(find)[assistant]",
        "[system]be brief[user]a\nb[assistant]so",
    ]
    assert [decode(list(out.prompt_token_ids)) for out in two] == [RENDERED] * 2


@pytest.mark.parametrize(
    ("messages", "keys", "complaint"),
    [
        ([], {}, "^messages=.*at least one"),
        ([{"content": "a"}], {}, r"^messages\[0\]=.*role"),
        ([{"role": "user", "content": 5}], {}, r"^messages\[0\].content=.*a text"),
        (
            [{"role": "user", "content": [{"type": "image_url"}]}],
            {},
            r"^messages\[0\].content='image_url': this model reads text",
        ),
        ([{"role": "user", "content": "a"}], {"tools": [{"name": "f"}]}, "^tools=.*give a list of"),
        (
            [{"role": "user", "content": "a"}],
            {"chat_template": "{% if %}"},
            "^chat_template=",
        ),
        (
            [{"role": "user", "content": "a"}],
            {"chat_template": "{{ raise_exception('no') }}"},
            "^messages=.*no$",
        ),
    ],
)
def test_a_chat_that_no_prompt_can_be_made_of_is_refused(llm, messages, keys, complaint):
    with pytest.raises(InvalidRequest, match=complaint):
        llm.chat(messages, params(), **keys)


def test_metrics_count_drafts_under_vllm_s_names(make_llm):
    llm = make_llm("EAGLE3", 3)

    def figures():
        found = {metric.name.removeprefix("vllm:"): metric for metric in llm.get_metrics()}
        assert {metric.labels["model_name"] for metric in found.values()} == {"target"}
        return {
            name: each.values if isinstance(each, Vector) else each.value
            for name, each in found.items()
        }

    assert not any(map(bool, figures().values()))
    (out,) = llm.generate([PROMPT * 4], params(max_tokens=30))
    llm.generate([PROMPT * 4], params(max_tokens=1))
    found, stats = figures(), out.speculation
    assert found["spec_decode_num_drafts"] <= stats.num_rounds
    assert found["spec_decode_num_draft_tokens"] == stats.num_draft_tokens > 0
    assert found["spec_decode_num_accepted_tokens"] == stats.num_correct_drafts > 0
    assert sum(found["spec_decode_num_accepted_tokens_per_pos"]) == stats.num_correct_drafts
    assert found["prefix_cache_hits"] > 0
    assert llm.reset_prefix_cache()
    assert llm.generate([PROMPT * 4], params())[0].num_cached_tokens == 0
    llm.shutdown()


@pytest.fixture(scope="module")
def async_llm(pair):
    made = AsyncLLM(str(pair.target), **arguments(pair, max_model_len=512))
    yield made
    made.shutdown()
    with pytest.raises(ProcessLookupError):
        os.kill(made.engine.pid, 0)


async def collect(llm, *args, **keys):
    return [output async for output in llm.generate(*args, **keys)]


def test_an_engine_in_its_own_process_gives_the_texts_of_one_in_this(async_llm, llm):
    kinds = RequestOutputKind

    async def scenario():
        wanted = [params(n=2, temperature=1.0, output_kind=kind, logprobs=1) for kind in kinds]
        return await asyncio.gather(*(collect(async_llm, "abc", each) for each in wanted))

    (plain,) = llm.generate("abc", params(n=2, temperature=1.0, logprobs=1))
    found = dict(zip(kinds, asyncio.run(scenario()), strict=True))
    assert os.getpid() != async_llm.engine.pid
    (final,) = found[kinds.FINAL_ONLY]
    growing, pieces = found[kinds.CUMULATIVE], found[kinds.DELTA]
    for index, text in enumerate(plain.outputs):
        of_kind = final.outputs[index], growing[-1].outputs[index]
        assert [each.token_ids for each in of_kind] == [text.token_ids] * 2
        assert [each.text for each in of_kind] == [text.text] * 2
        joined = [token for piece in pieces for token in piece.outputs[index].token_ids]
        assert tuple(joined) == text.token_ids
        assert "".join(piece.outputs[index].text for piece in pieces) == text.text
        lengths = [len(output.outputs[index].token_ids) for output in growing]
        assert lengths == sorted(lengths)
    assert (final.prompt, final.prompt_token_ids) == ("abc", plain.prompt_token_ids)
    assert [output.finished for output in growing] == [False] * (len(growing) - 1) + [True]


def test_leaving_the_iterator_and_abort_end_a_request(async_llm):
    endless = params(max_tokens=LONG)

    async def scenario():
        iterator = async_llm.generate([1, 2], endless, "left")
        async for _ in iterator:
            break
        with pytest.raises(InvalidRequest, match="request_id='left'"):
            await collect(async_llm, [1], endless, "left")
        assert (await anext(iterator)).finish_reason is None
        await iterator.aclose()
        outputs = []
        async for output in async_llm.generate([1, 2], endless, "ended"):
            outputs.append(output)
            await async_llm.abort("ended")
        assert outputs[-1].finish_reason == "abort"
        await async_llm.abort("ended")
        while async_llm.engine.snapshot()["num_running"]:
            await asyncio.sleep(0.05)
        assert await collect(async_llm, [1, 2], params(), "left")
        await async_llm.check_health()
        assert await async_llm.reset_prefix_cache()
        with pytest.raises(InvalidRequest, match=r"prompt=.*shorten"):
            await collect(async_llm, [1] * 512, params())
        (*_, kept) = await collect(async_llm, [*range(200)], params(truncate_prompt_tokens=2))
        assert kept.prompt_token_ids == (198, 199)

    asyncio.run(scenario())


async def killed(llm):
    async for _ in llm.generate([1, 2], params(max_tokens=LONG)):
        os.kill(llm.engine.pid, signal.SIGKILL)


def test_a_death_of_the_process_ends_iterators_with_an_error(pair):
    async def scenario():
        async with AsyncLLM(str(pair.target), **arguments(pair, max_model_len=512)) as llm:
            with pytest.raises(RuntimeError, match="the engine's process has ended"):
                await killed(llm)
            with pytest.raises(RuntimeError, match="the engine's process has ended"):
                await collect(llm, [1, 2], params())
        with pytest.raises(RuntimeError):
            await llm.check_health()

    asyncio.run(scenario())


def test_what_the_process_cannot_start_with_is_raised_here(pair, tmp_path):
    with pytest.raises(ValueError, match="num_pages=4"):
        AsyncLLM(str(pair.target), **arguments(pair, num_pages=4))
    with pytest.raises(CheckpointError):
        AsyncLLM(str(pair.target), **arguments(pair, tensor_parallel_size=3))
