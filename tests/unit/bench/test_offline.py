"""Laws of the offline benchmark, run whole on a tiny random pair."""

import json
from pathlib import Path

import pytest

from serve_spec.bench.command import main
from serve_spec.bench.workload import held_out_prompts
from tests.unit.bench.configs import write_config


def byte_ids(text: str) -> list[int]:
    return list(text.encode())


def test_prompts_are_the_same_every_time_and_exactly_as_long_as_asked() -> None:
    first, second = (held_out_prompts(byte_ids, count=5, num_tokens=60) for _ in range(2))
    assert first == second
    assert [len(prompt) for prompt in first] == [60] * 5
    assert first != held_out_prompts(byte_ids, count=5, num_tokens=60, seed=1)


def test_prompts_need_an_installed_package() -> None:
    with pytest.raises(ValueError, match="no_such_package"):
        held_out_prompts(byte_ids, count=1, num_tokens=10, packages=["no_such_package"])


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_config(tmp_path_factory.mktemp("bench"))


def test_every_arm_says_the_same_and_the_last_line_is_the_whole_result(
    config: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = [
        "offline",
        "--config",
        str(config),
        "--num-prompts",
        "3",
        "--batch-sizes",
        "1",
        "2",
    ]
    arguments += ["--prompt-tokens", "20", "--output-tokens", "12", "--repetitions", "2"]
    arguments += ["--num-steps", "1", "3", "--temperatures", "0", "1"]
    arguments += ["--json", str(tmp_path / "r.json"), "--plot", str(tmp_path / "r.png")]
    assert main(arguments) == 0
    result = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert result == json.loads((tmp_path / "r.json").read_text())
    cells = result["cells"]
    assert [cell["arm"] for cell in cells[:4]] == ["off", "K=1", "K=3", "adaptive"]
    assert len(cells) == 4 * 2 * 2
    assert all(cell["same_texts"] == 3 and cell["tokens_per_second"] > 0 for cell in cells)
    by_arm = {cell["arm"]: cell for cell in cells if cell["batch_size"] == 1}
    assert by_arm["off"]["accept_length"] == 1.0
    assert 1.0 < by_arm["K=3"]["accept_length"] <= 4.0
    assert {"cpu", "commit", "versions", "command"} <= set(result["environment"])
    assert "synthetic_acceptance" not in result["environment"]
    assert (tmp_path / "r.png").read_bytes().startswith(b"\x89PNG")


def test_figures_of_forced_acceptance_say_so_in_the_table_and_in_the_result(
    config: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["offline", "--config", str(config), "--num-prompts", "2", "--repetitions", "1"]
    arguments += ["--prompt-tokens", "20", "--output-tokens", "24", "--num-steps", "3"]
    arguments += ["--temperatures", "0", "--set", "synthetic_acceptance=[1.0]"]
    assert main(arguments) == 0, "texts differ by construction: that is no failure"
    *lines, last = capsys.readouterr().out.splitlines()
    assert any("synthetic_acceptance=(1.0,)" in line for line in lines)
    result = json.loads(last)
    assert result["environment"]["synthetic_acceptance"] == [1.0]
    accept_length = {cell["arm"]: cell["accept_length"] for cell in result["cells"]}
    assert accept_length["off"] == 1.0, "what it is compared with stays plain decoding"
    # All drafts are kept; only the end of a text leaves room for fewer.
    assert accept_length["K=3"] > 3.5


def test_a_batch_is_always_filled_and_decoding_has_a_speed_of_its_own(
    config: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["offline", "--config", str(config), "--num-prompts", "1", "--repetitions", "1"]
    arguments += ["--prompt-tokens", "20", "--output-tokens", "30", "--num-steps", "1"]
    arguments += ["--temperatures", "0", "--batch-sizes", "3", "--plot", str(tmp_path / "r.png")]
    assert main(arguments) == 0
    cells = json.loads(capsys.readouterr().out.splitlines()[-1])["cells"]
    assert [cell["num_texts"] for cell in cells] == [3, 3, 3]
    assert cells[0]["decode_speedup"] == 1.0
    for cell in cells:
        over_off = cell["decode_tokens_per_second"] / cells[0]["decode_tokens_per_second"]
        assert cell["decode_speedup"] == pytest.approx(over_off)
    assert set(cells[1]["rounds_by_num_steps"]) <= {"0", "1"}, "a last token needs no draft"
    assert (tmp_path / "r.png").read_bytes().startswith(b"\x89PNG")
