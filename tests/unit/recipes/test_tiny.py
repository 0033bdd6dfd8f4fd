"""The recipe of the shipped pair: licences, held-out files, tokenizer, its phases."""

import json
from pathlib import Path

import pytest
import torch
from transformers import AutoTokenizer

from recipes import train
from recipes.tiny.corpus import Source, build_corpus
from recipes.tiny.licences import check_licence
from recipes.tiny.program import PHASES, PROGRAMS
from recipes.tiny.settings import CorpusLimits
from recipes.tiny.tokenizer import encode_documents, save_tokenizer, train_tokenizer
from recipes.training.loop import read_log
from recipes.training.phases import DRAFT_PHASES, Workshop
from recipes.training.settings import EOS_ID, with_length

OSI = "License :: OSI Approved :: "


@pytest.mark.parametrize(
    ("expression", "classifiers", "field"),
    [
        ("BSD-3-Clause AND (MIT OR GPL-2.0-only)", [], None),
        ("Apache-2.0 WITH LLVM-exception", [], None),
        (None, [OSI + "BSD License"], "Copyright notice " * 40),
        (None, [OSI + "Apache Software License", OSI + "BSD License"], "Dual License"),
        (None, [], "Apache License, Version 2.0"),
        (None, ["License :: OSI Approved"], "3-Clause BSD License"),
    ],
)
def test_permissive_licences_are_accepted(expression, classifiers, field):
    assert check_licence(expression, classifiers, field).accepted


@pytest.mark.parametrize(
    ("expression", "classifiers", "field"),
    [
        (None, [], None),
        (None, [], "MIT " * 60),
        ("GPL-3.0-only", [], None),
        ("MIT AND (BSD-3-Clause", [], None),
        ("Apache-2.0 WITH Some-exception", [], None),
        ("LicenseRef-NVIDIA-Proprietary", [], "MIT"),
        (None, [OSI + "MIT License", OSI + "GNU General Public License (GPL)"], None),
        (None, [OSI + "MIT License"], "LGPL"),
    ],
)
def test_unknown_and_copyleft_licences_are_refused(expression, classifiers, field):
    assert not check_licence(expression, classifiers, field).accepted


def sources_in(folder):
    """Two packages that share a file; the second, held out, comes last in the alphabet."""
    texts = {
        "alpha/one.py": "one = 1\n" * 40,
        "alpha/copy.py": "shared = 2\n" * 40,
        "networkx/own.py": "shared = 2\n" * 40,
        "networkx/graph.py": "graph = 3\n" * 40,
    }
    for name, text in texts.items():
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text(text)
    return [
        Source(name, "1.0", "MIT", tuple((folder / name).glob("*.py")))
        for name in ("alpha", "networkx")
    ]


def test_texts_of_held_out_packages_are_not_in_the_training_set_nor_in_the_manifest(tmp_path):
    corpus = build_corpus(sources_in(tmp_path), {"gplthing": "GPL"}, CorpusLimits(), seed=0)
    assert corpus.train == ["one = 1\n" * 40]
    assert len(corpus.held_out) == 2
    assert corpus.duplicates == 1
    manifest = corpus.manifest()
    assert manifest["totals"] == {
        "train": {"packages": 1, "files": 1, "bytes": 320},
        "held_out": {"packages": 1, "files": 2, "bytes": 840},
    }
    assert manifest["refused"] == {"gplthing": "GPL"}
    assert "shared" not in str(manifest)


def test_the_tokenizer_round_trip_is_lossless_on_any_text(tmp_path):
    source = Path(__file__).read_text()
    tokenizer = train_tokenizer([source], vocab_size=400, max_chars=10**6)
    save_tokenizer(tokenizer, tmp_path, model_max_length=64)
    loaded = AutoTokenizer.from_pretrained(tmp_path)
    for text in (source, "  \t x\r\n\n\n", "ñ 漢字 🙂 \x00", " leading , and trailing  "):
        ids = loaded(text)["input_ids"]
        assert ids[0] == EOS_ID == loaded.eos_token_id
        assert loaded.decode(ids, skip_special_tokens=True) == text
        assert tokenizer.decode(tokenizer.encode(text).ids) == text


def test_every_document_of_a_stream_starts_with_eos():
    texts = ["a = 1\n" * 30, "b = 2\n" * 30]
    tokenizer = train_tokenizer(texts, vocab_size=260, max_chars=10**6)
    stream = encode_documents(tokenizer, texts, max_tokens=10**6)
    assert stream.dtype == torch.int16
    assert int((stream == EOS_ID).sum()) == 2
    assert stream[0] == EOS_ID
    assert tokenizer.decode(stream.tolist()) == "".join(texts)


def test_the_recipe_adds_its_phases_to_those_of_the_drafts():
    assert list(PHASES) == ["tokenizer", "target", *DRAFT_PHASES, "plot"]
    assert all(PHASES[name][1] == mark for name, (_, mark) in DRAFT_PHASES.items())


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        ("huge", "invalid choice: 'huge' (choose from"),
        ("all --preset huge", "invalid choice: 'huge' (choose from"),
        ("all --steps eagle4=3", "phase='eagle4': unknown; use one of ['target', 'eagle3', "),
        ("all --seconds target", "seconds='target': not PHASE=NUMBER"),
        ("export", "phase='export': no folder; give --out FOLDER"),
    ],
)
def test_the_command_names_a_wrong_argument_and_the_remedy(capsys, arguments, problem):
    try:
        status = train.main(arguments.split())
    except SystemExit as exit:
        status = exit.code
    assert status == 2
    assert problem in capsys.readouterr().err


def test_a_phase_without_its_corpus_is_refused_with_the_phase_to_run_first(tmp_path, capsys):
    line = ["target", "--preset", "smoke", "--work", str(tmp_path), "--device", "cpu"]
    assert train.main(line) == 2
    (problem,) = capsys.readouterr().err.splitlines()
    assert "tokens.pt: missing; run `python -m recipes.train" in problem


def test_every_phase_of_the_smoke_recipe_runs(tmp_path):
    """From given tokens, on a CPU: target, pool, all drafts, evaluation."""
    recipe = PROGRAMS["smoke"].recipe()
    for name, steps in (("target", 12), ("eagle3", 3), ("eagle", 3), ("medusa", 3)):
        recipe = with_length(recipe, name, steps=steps)
    recipe = with_length(recipe, "standalone", steps=3)
    shop = Workshop(recipe, tmp_path, torch.device("cpu"), quiet=True)
    cycle = torch.arange(1, 65, dtype=torch.int16).repeat(40)
    torch.save({"train": cycle, "held_out": cycle[:900]}, tmp_path / "tokens.pt")
    PHASES["target"][0](shop)
    for name in (*DRAFT_PHASES, "plot"):
        phase, mark = PHASES[name]
        if name == "rollout":
            phase = DRAFT_PHASES[name][0]  # the recipe's also needs a tokenizer
        phase(shop)
        assert (tmp_path / mark).exists(), name
    rows = read_log(tmp_path / "logs" / "target.jsonl")
    assert rows[-1]["loss"] < rows[0]["loss"]
    drafters = json.loads((tmp_path / "report" / "acceptance.json").read_text())
    assert set(drafters["temperatures"]["0.0"]["drafters"]) == {
        "eagle3", "eagle", "medusa", "standalone",
    }  # fmt: skip
