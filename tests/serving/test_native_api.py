"""The endpoints of vLLM and SGLang beside the OpenAI API."""

import json

import pytest

from serve_spec import __version__
from serve_spec.config import ServeSpecConfig
from serve_spec.core.request import FinishReason
from serve_spec.serving.messages import Accepted
from tests.serving.asgi import Server, chunks_of
from tests.serving.conftest import MODEL
from tests.serving.fakes import ScriptedFleet, delta
from tests.serving.texts import BOS, TEMPLATE, WORDS, byte_tokenizer, write_text_files

USER = {"role": "user", "content": "a"}
A, B, C = (WORDS[word] for word in "abc")


def generate(server, **body):
    return server.ask("POST", "/generate", json=body)


def test_generate_answers_as_sglang_does(server):
    sampling = {"max_new_tokens": 3, "temperature": 0, "ignore_eos": True, "top_k": 1 << 30}
    answer = generate(server, text="a b", sampling_params=sampling, lora_path=None).json()
    assert (answer["text"], answer["output_ids"]) == ("a b a ", [A, B, A])
    info = answer["meta_info"]
    assert info["finish_reason"] == {"type": "length", "length": 3}
    assert (info["prompt_tokens"], info["completion_tokens"], info["cached_tokens"]) == (2, 3, 0)
    assert info["spec_accept_length"] > 1
    by_ids = generate(server, input_ids=[A, B], sampling_params=sampling, rid="mine").json()
    assert (by_ids["text"], by_ids["meta_info"]["id"]) == ("a b a ", "mine")


def test_generate_has_a_list_for_a_list_and_for_several_choices(server):
    sampling = {"max_new_tokens": 1}
    for prompts in ({"text": ["a"]}, {"input_ids": [[A]]}, {"text": ["a", "b"]}):
        answers = generate(server, **prompts, sampling_params=sampling).json()
        assert len(answers) == len(next(iter(prompts.values())))
    several = generate(server, text=["a", "b"], sampling_params={**sampling, "n": 2}).json()
    assert [answer["text"] for answer in several] == ["a ", "a ", "b ", "b "]
    one = generate(server, text="a", sampling_params={**sampling, "n": 2}).json()
    assert len(one) == 2


def test_generate_ends_at_the_context_if_it_may_go_on(server):
    for sampling in ({}, {"max_new_tokens": 1000}):
        info = generate(server, text="a b c", sampling_params=sampling).json()["meta_info"]
        assert (info["completion_tokens"], info["finish_reason"]["type"]) == (64 - 3, "length")
    answer = generate(server, text="a " * 64)
    assert (answer.status_code, answer.json()["error"]["param"]) == (413, "text")


@pytest.mark.parametrize("stream", [False, True])
def test_generate_returns_log_probabilities_of_prompt_and_answer(server, stream):
    asked = {"return_logprob": True, "logprob_start_len": 1, "top_logprobs_num": 2}
    answer = generate(
        server, text="a b c", sampling_params={"max_new_tokens": 3}, stream=stream, **asked
    )
    info = (chunks_of(answer)[-1] if stream else answer.json())["meta_info"]
    assert [token for _, token, _ in info["output_token_logprobs"]] == [A, B, C]
    assert [token for _, token, _ in info["input_token_logprobs"]] == [B, C]
    assert [len(top) for top in info["output_top_logprobs"]] == [2] * 3
    assert [len(top) for top in info["input_top_logprobs"]] == [2] * 2
    whole = generate(server, text="a b", return_logprob=True, logprob_start_len=0).json()
    assert whole["meta_info"]["input_token_logprobs"][0] == [None, A, None]


def test_a_stream_of_generate_repeats_the_text_so_far(server):
    sampling = {"max_new_tokens": 5, "stop": "z"}
    events = chunks_of(generate(server, text="a b c", sampling_params=sampling, stream=True))
    assert [event["text"] for event in events] == ["a b ", "a b c a ", "a b c a b "]
    assert [event["meta_info"]["completion_tokens"] for event in events] == [2, 4, 5]
    reasons = [event["meta_info"]["finish_reason"] for event in events]
    assert reasons == [None, None, {"type": "length", "length": 5}]
    assert {event["meta_info"]["prompt_tokens"] for event in events} == {3}
    has_length = ["spec_accept_length" in event["meta_info"] for event in events]
    assert has_length == [False, False, True]
    assert ["output_ids" in event for event in events] == has_length


def test_a_stream_of_generate_counts_tokens_without_text(server, config):
    items = [delta("", A), delta("a", B), delta("", C), delta("", finish=FinishReason.STOP)]
    fleet = ScriptedFleet([Accepted(1, "r"), *items])
    events = chunks_of(generate(Server(config, fleet), text="a", stream=True))
    assert [event["meta_info"]["completion_tokens"] for event in events] == [2, 3]
    assert events[-1]["output_ids"] == [A, B, C]


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({}, "text"),
        ({"text": "a", "input_ids": [5]}, "text"),
        ({"text": 3}, "text"),
        ({"input_ids": [-1]}, "input_ids"),
        ({"text": "a", "sampling_params": [{}]}, "sampling_params"),
        ({"text": "a", "sampling_params": {"max_new_tokens": "3"}}, "max_new_tokens"),
        ({"text": "a", "sampling_params": {"sampling_seed": 2**64}}, "sampling_seed"),
        ({"text": "a", "sampling_params": {"temperature": -1}}, "temperature"),
        ({"text": "a", "sampling_params": {"stop_regex": "a+"}}, "stop_regex"),
        ({"text": "a", "sampling_params": {"regex": "a", "json_schema": "{}"}}, "regex"),
        ({"text": "a", "lora_path": "x"}, "lora_path"),
        ({"text": "a", "return_hidden_states": True}, "return_hidden_states"),
        ({"text": "a", "top_logprobs_num": 21}, "top_logprobs_num"),
    ],
    ids=repr,
)
def test_what_generate_cannot_do_is_a_400_that_names_it(server, body, param):
    answer = generate(server, **body)
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == param


class TestTokens:
    @pytest.fixture
    def server(self, config):
        write_text_files(config.model.folder, TEMPLATE)
        return Server(config)

    def ask(self, server, path, **body):
        return server.ask("POST", path, json=body)

    def test_a_prompt_becomes_tokens_and_tokens_text(self, server):
        answer = self.ask(server, "/tokenize", prompt="é", model=MODEL, return_token_strs=True)
        ids = byte_tokenizer().encode("é").ids
        assert answer.json() == {
            "count": 3, "max_model_len": 64, "tokens": ids, "token_strs": [BOS, "\ufffd", "\ufffd"],
        }  # fmt: skip
        bare = self.ask(server, "/tokenize", prompt="é", add_special_tokens=False).json()
        assert (bare["tokens"], bare["token_strs"]) == (ids[1:], None)
        assert self.ask(server, "/detokenize", tokens=ids).json() == {"prompt": f"{BOS}é"}

    def test_a_chat_becomes_the_tokens_that_its_completion_reads(self, server):
        messages = [USER]
        chat = server.ask(
            "POST", "/v1/chat/completions",
            json={"messages": messages, "max_tokens": 1, "return_token_ids": True},
        )  # fmt: skip
        answer = self.ask(server, "/tokenize", messages=messages)
        assert answer.json()["tokens"] == chat.json()["prompt_token_ids"]
        left_open = self.ask(server, "/tokenize", messages=messages, add_generation_prompt=False)
        assert left_open.json()["count"] < answer.json()["count"]

    @pytest.mark.parametrize(
        ("path", "body", "status", "param"),
        [
            ("/tokenize", {}, 400, "prompt"),
            ("/tokenize", {"prompt": "a", "messages": [USER]}, 400, "prompt"),
            ("/tokenize", {"messages": []}, 400, "messages"),
            ("/tokenize", {"messages": [{"role": "x", "content": "a"}]}, 400, "messages.0.role"),
            ("/tokenize", {"prompt": "a" * 600}, 413, "prompt"),
            ("/tokenize", {"prompt": "a", "model": "other"}, 404, "model"),
            ("/detokenize", {"tokens": [-1]}, 400, "tokens.0"),
            ("/detokenize", {"tokens": [1], "model": "other"}, 404, "model"),
        ],
    )
    def test_wrong_bodies_are_refused_by_name(self, server, path, body, status, param):
        answer = self.ask(server, path, **body)
        assert (answer.status_code, answer.json()["error"]["param"]) == (status, param)


def test_the_servers_state_is_told_under_the_names_of_vllm_and_sglang(server):
    assert server.ask("GET", "/version").json() == {"version": __version__}
    assert server.ask("GET", "/load").json() == {"server_load": 0}
    for method, path in (("GET", "/ping"), ("POST", "/ping"), ("GET", "/health_generate")):
        assert server.ask(method, path).json()["status"] == "ok"
    for path in ("/get_model_info", "/model_info"):
        info = server.ask("GET", path).json()
        assert (info["served_model_name"], info["is_generation"]) == (MODEL, True)
    infos = [server.ask("GET", path).json() for path in ("/get_server_info", "/server_info")]
    assert infos[0] == infos[1]


@pytest.mark.parametrize(
    ("method", "path"),
    [("GET", "/flush_cache"), ("POST", "/flush_cache"), ("POST", "/reset_prefix_cache")],
)
def test_the_cache_of_every_replica_is_flushed(server, method, path):
    assert server.ask(method, path).status_code == 200
    assert server.loop.num_flushes == 1


def test_probes_need_no_key_and_flushing_does(config):
    server = Server(ServeSpecConfig.load(config, api_keys=["k"]))
    assert server.ask("GET", "/ping").status_code == 200
    for method, path in (("POST", "/flush_cache"), ("POST", "/generate"), ("GET", "/openapi.json")):
        assert server.ask(method, path).status_code == 401


def test_the_documentation_page_reads_the_schema_of_its_own_server(server):
    answer = server.ask("GET", "/docs", root_path="/llm")
    assert '<base href="/llm/">' in answer.text
    assert "//" not in answer.text.split("<head>")[1].replace("</", ""), "no other host"
    assert "connect-src 'self'" in answer.headers["content-security-policy"]
    assert json.loads(server.ask("GET", "/openapi.json").text)["paths"]["/generate"]
