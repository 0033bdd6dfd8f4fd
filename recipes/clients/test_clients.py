"""Other projects' clients against the shipped pair, served as the README says: `make clients`."""

import json
import os
import re
import signal
import socket
import subprocess
import sys
from pathlib import Path

import instructor
import litellm
import openai
import pytest
from langchain_core.messages import HumanMessage
from langchain_openai import ChatOpenAI, OpenAI
from pydantic import BaseModel, Field

ROOT = Path(__file__).parents[2]
MODEL = "tiny"
USER = {"role": "user", "content": "def add(a, b):"}


class Point(BaseModel):
    """What answers are parsed as."""

    x: int = Field(ge=0, le=9)
    y: int = Field(ge=0, le=9)


@pytest.fixture(scope="session")
def url():
    """Base URL of `serve-spec serve deploy/tiny.yaml`, with figures of each request."""
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = str(probe.getsockname()[1])
    command = [os.environ["SERVE_SPEC"], "serve", "deploy/tiny.yaml", "--port", port]
    command += ["--per-request-spec-decode-metrics", "detailed"]
    server = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True)
    try:
        ready = (re.match(r"ready: .* at (http\S+)", line) for line in server.stdout)
        yield next(found[1] for found in ready if found)
    finally:
        server.send_signal(signal.SIGINT)
        server.communicate(timeout=120)


@pytest.fixture(scope="session")
def client(url):
    return openai.OpenAI(base_url=f"{url}/v1", api_key="none")


def test_openai_parses_an_answer_of_a_schema(client):
    answer = client.chat.completions.parse(
        model=MODEL, messages=[USER], response_format=Point, temperature=0, max_tokens=40
    )
    assert isinstance(answer.choices[0].message.parsed, Point)


@pytest.mark.parametrize("stream", [False, True])
def test_litellm_completes_and_chats(url, stream):
    common = {"api_base": f"{url}/v1", "api_key": "none", "max_tokens": 8, "stream": stream}
    texts = []
    for answer in (
        litellm.completion(model=f"openai/{MODEL}", messages=[USER], seed=1, **common),
        litellm.text_completion(
            model=f"text-completion-openai/{MODEL}", prompt=USER["content"], seed=1, **common
        ),
    ):
        if not stream:
            assert answer.usage.completion_tokens > 0
        choices = [c for chunk in answer for c in chunk.choices] if stream else answer.choices
        contents = (
            c.get("text") or (c.get("delta") or c.get("message") or {}).get("content")
            for c in choices
        )
        texts.append("".join(text for text in contents if text))
    assert all(texts)


def test_langchain_completes_chats_and_streams(url):
    common = {"base_url": f"{url}/v1", "api_key": "none", "model": MODEL, "max_tokens": 8}
    chat = ChatOpenAI(**common, temperature=0)
    whole = chat.invoke([HumanMessage(USER["content"])])
    assert whole.usage_metadata["output_tokens"] <= 8
    streamed = "".join(chunk.content for chunk in chat.stream([HumanMessage(USER["content"])]))
    assert streamed == whole.content
    assert OpenAI(**common).invoke(USER["content"])
    assert len(OpenAI(**common).batch(["a", "b"])) == 2


def test_langchain_gets_structured_output(url):
    chat = ChatOpenAI(base_url=f"{url}/v1", api_key="none", model=MODEL, max_tokens=40)
    found = chat.with_structured_output(Point, method="json_schema").invoke(USER["content"])
    assert isinstance(found, Point)


@pytest.mark.parametrize("mode", [instructor.Mode.JSON_SCHEMA, instructor.Mode.TOOLS])
def test_instructor_returns_an_object(client, mode):
    found = instructor.from_openai(client, mode=mode).chat.completions.create(
        model=MODEL,
        messages=[USER],
        response_model=Point,
        max_tokens=60,
        temperature=0,
        max_retries=0,
    )
    assert isinstance(found, Point)


def test_lm_eval_scores_likelihoods(url, tmp_path):
    """A task of two choices each; the choice that repeats the prompt is likelier."""
    documents = [
        {"question": f"import {name}\nimport ", "choices": [name, "zq%#"], "answer": 0}
        for name in ("os", "sys", "re", "json")
    ]
    data = tmp_path / "data.jsonl"
    data.write_text("\n".join(map(json.dumps, documents)))
    task = {
        "task": "likelihoods",
        "dataset_path": "json",
        "dataset_kwargs": {"data_files": {"test": str(data)}},
        "test_split": "test",
        "output_type": "multiple_choice",
        "doc_to_text": "{{question}}",
        "doc_to_target": "answer",
        "doc_to_choice": "choices",
        "target_delimiter": "",
        "metric_list": [{"metric": "acc"}],
    }
    (tmp_path / "likelihoods.yaml").write_text(json.dumps(task))
    tokenizer = ROOT / "serve_spec/assets/tiny/target"
    model_args = f"model={MODEL},base_url={url}/v1/completions,tokenizer={tokenizer}"
    command = [
        *(sys.executable, "-m", "lm_eval", "run", "--model", "local-completions"),
        *("--model_args", model_args, "--include_path", str(tmp_path)),
        *("--tasks", "likelihoods", "--output_path", str(tmp_path / "out")),
    ]
    offline = {"HF_HUB_OFFLINE": "1", "HF_HOME": str(tmp_path / "hub"), "OPENAI_API_KEY": "none"}
    subprocess.run(command, check=True, env={**os.environ, **offline})
    (result,) = (tmp_path / "out").rglob("results_*.json")
    scores = json.loads(result.read_text())["results"]["likelihoods"]
    assert scores["acc,none"] == 1.0


def test_aiperf_reports_the_speculation_of_requests_and_of_the_server(url, tmp_path):
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text("\n".join([json.dumps({"text": USER["content"]})] * 8))
    command = [
        *(sys.executable, "-m", "aiperf", "profile", "--model", MODEL, "--url", url),
        *("--tokenizer", str(ROOT / "serve_spec/assets/tiny/target"), "--ui", "simple"),
        *("--endpoint-type", "chat", "--streaming", "--request-count", "8", "--concurrency", "2"),
        *("--input-file", str(prompts), "--custom-dataset-type", "single_turn"),
        *("--output-tokens-mean", "32", "--extra-inputs", "temperature:0"),
        *("--output-artifact-dir", str(tmp_path)),
    ]
    ran = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
    assert "LLM Metrics: Spec Decode" in ran.stdout
    assert "Server Metrics: Speculative Decoding" in ran.stdout
    (found,) = tmp_path.rglob("profile_export_aiperf.json")
    figures = json.loads(found.read_text())
    assert figures["request_count"]["avg"] == 8
    assert not figures.get("error_request_count")
    assert 1 < figures["spec_decode_token_weighted_acceptance_length"]["avg"] < 8
