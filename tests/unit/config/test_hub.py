"""A checkpoint may be named by its id on the Hugging Face hub."""

import errno
import os
import subprocess
import sys
from pathlib import Path
from threading import Event
from types import SimpleNamespace

import httpx
import pytest
from huggingface_hub import errors, snapshot_download

from serve_spec import cli
from serve_spec.config import ConfigError, ServeSpecConfig
from serve_spec.config import hub as config_hub
from serve_spec.config.base import ASSETS
from tests.helpers.checkpoints import make_eagle3, make_target
from tests.helpers.hub import COMMIT, FakeHub, add_repository, use_cache

ID = "ada/tiny"
SHARD = "model-00002-of-00005.safetensors"
TINY = Path(__file__).parents[3] / "configs/tiny.yaml"


@pytest.fixture(autouse=True)
def asks_anew(monkeypatch):
    """Forget what other tests asked a hub."""
    monkeypatch.setattr(config_hub, "_answers", {})
    config_hub._warn.cache_clear()
    config_hub._listed.cache_clear()


@pytest.fixture
def snapshot(tmp_path, monkeypatch):
    """The folder of a repository that is in the cache."""
    use_cache(monkeypatch, tmp_path / "hub")
    monkeypatch.chdir(tmp_path)
    return add_repository(tmp_path / "hub", ID, ASSETS / "tiny/target")


def model(source, **overrides):
    return ServeSpecConfig.load(source, **overrides).model


def test_a_hub_id_is_found_in_the_cache_without_a_network_unless_it_is_a_folder(snapshot, tmp_path):
    found = model(ID)
    assert (found.path, found.served_model_name) == (ID, ID)
    assert (found.folder, found.metadata_folder, found.tokenizer_folder) == (snapshot,) * 3
    for file in snapshot.glob("*.safetensors"):
        file.rename(file.with_suffix(".bin"))
    assert model(ID).folder == snapshot, "weights that are only pickled are used"
    (tmp_path / ID).mkdir(parents=True)
    assert model(ID).folder == tmp_path / ID


class Network:
    """Every request to the hub fails or answers as told, and is counted."""

    def __init__(self, monkeypatch, answer):
        self.asked, self.answer = [], answer
        monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
        monkeypatch.setattr("huggingface_hub.HfApi.model_info", self._model_info)
        monkeypatch.setattr("huggingface_hub.HfApi.list_repo_files", lambda *args, **kwargs: [])
        monkeypatch.setattr("huggingface_hub.snapshot_download", self._snapshot_download)

    def _model_info(self, name, *, revision, **kwargs):
        self.asked.append(f"{name}@{revision}")
        answer = self.answer()
        if isinstance(answer, Exception):
            raise answer
        return SimpleNamespace(sha=answer)

    def _snapshot_download(self, name, *, local_files_only, **kwargs):
        if not local_files_only:
            self.asked.append(f"download of {name}")
        return snapshot_download(name, local_files_only=True, **kwargs)


class NoRouteError(Exception):
    """An error of the HTTP library, of no class that this project knows."""


def load_all(name):
    config = ServeSpecConfig.load(
        name, tokenizer_path=name, speculative_draft_model_path=name, speculative_algorithm="EAGLE3"
    ).download()
    return {config.model.folder, config.model.tokenizer_folder, config.draft_folder}


def never_answer():
    Event().wait()


@pytest.mark.parametrize("answer", [NoRouteError, never_answer])
def test_a_hub_that_is_silent_is_asked_once_and_the_cache_used_with_one_warning(
    snapshot, monkeypatch, answer
):
    monkeypatch.setattr(config_hub, "_TIMEOUT_S", 0.05)
    warnings = []
    logger = SimpleNamespace(warning=lambda text, why: warnings.append(why))
    monkeypatch.setattr(config_hub, "get_logger", lambda name: logger)
    other = add_repository(snapshot.parents[2], "ada/other", snapshot)
    network = Network(monkeypatch, answer)
    assert load_all(ID) == {snapshot}
    assert load_all("ada/other") == {other}
    assert network.asked == [f"{ID}@main"]
    assert ["cannot be reached" in warning for warning in warnings] == [True]


def test_a_commit_in_the_cache_needs_no_network_and_a_branch_one_question(snapshot, monkeypatch):
    network = Network(monkeypatch, lambda: COMMIT)
    assert load_all(f"{ID}@{COMMIT}") == {snapshot}
    assert network.asked == []
    assert load_all(ID) == {snapshot}
    assert network.asked == [f"{ID}@main"]


@pytest.mark.parametrize("lacks", ["config.json", "tokenizer.json", SHARD])
def test_an_incomplete_commit_is_downloaded(snapshot, monkeypatch, lacks):
    (snapshot / lacks).unlink()
    network = Network(monkeypatch, lambda: COMMIT)
    found = model(f"{ID}@{COMMIT}")
    assert {found.folder, found.metadata_folder} == {snapshot}
    assert f"download of {ID}" in network.asked


def test_a_refusal_ends_the_start_only_if_the_cache_is_empty(snapshot, monkeypatch):
    Network(monkeypatch, lambda: errors.GatedRepoError("no", response=RESPONSE))
    assert model(ID).folder == snapshot
    with pytest.raises(ConfigError, match="gated; accept the licence"):
        _ = model("ada/other").folder


def test_drafts_and_tokenizers_may_be_on_the_hub_too(snapshot):
    config = ServeSpecConfig.load(
        "asset:tiny/target",
        tokenizer_path=ID,
        speculative_algorithm="EAGLE3",
        speculative_draft_model_path=f"{ID}@main",
    )
    assert (config.model.tokenizer_folder, config.draft_folder) == (snapshot, snapshot)
    assert config.model.folder == ASSETS / "tiny/target"


def test_downloads_may_have_a_folder_of_their_own(snapshot, tmp_path):
    mine = tmp_path / "mine"
    folder = add_repository(mine, "ada/other", ASSETS / "tiny/target")
    config = ServeSpecConfig.load("ada/other", download_dir=mine)
    assert config.model.folder == folder
    assert config.download().model.path == f"ada/other@{COMMIT}"
    with pytest.raises(ConfigError, match="it is not in the cache"):
        ServeSpecConfig.load("ada/other").download()


@pytest.mark.parametrize("revision", ["main", COMMIT])
def test_a_revision_stands_behind_the_id_or_in_its_own_key_and_is_pinned(snapshot, revision):
    for named in (model(ID, revision=revision), model(f"{ID}@{revision}")):
        assert (named.folder, named.served_model_name) == (snapshot, ID)
    for path in (f"{ID}@main", "asset:tiny/target"):
        with pytest.raises(ConfigError, match=r"model\.revision='main': "):
            model(path, revision="main")
    config = ServeSpecConfig.load(ID, revision="main").pinned()
    assert (config.model.path, config.model.revision) == (f"{ID}@{COMMIT}", None)
    assert config.model.names == (ID,)
    assert config.pinned() == config


def test_the_shipped_pair_is_one_name():
    assert (ASSETS / "tiny/config.yaml").read_text() == TINY.read_text()
    config = ServeSpecConfig.load("asset:tiny", num_pages=2048)
    assert config.model.folder == ASSETS / "tiny/target"
    assert config.draft_folder == ASSETS / "tiny/eagle3"
    assert (config.model.served_model_name, config.cache.num_pages) == ("tiny", 2048)


def test_a_shipped_pair_drafts_with_another_algorithm_without_its_head():
    config = ServeSpecConfig.load("asset:tiny", speculative_algorithm="NGRAM")
    assert config.draft_folder is None
    named = "asset:tiny/eagle"
    config = ServeSpecConfig.load(
        "asset:tiny", speculative_algorithm="EAGLE", speculative_draft_model_path=named
    )
    assert config.speculative.speculative_draft_model_path == named


@pytest.mark.parametrize("name", ["", "nope", "org/a/b", "https://huggingface.co/a/b", "a/b@"])
def test_what_is_neither_a_folder_nor_an_id_is_refused(tmp_path, monkeypatch, name):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match="give a folder, a hub id ORG/NAME") as caught:
        model(name)
    assert str(caught.value).startswith(f"model.path={name!r}: nothing at ")
    (tmp_path / "m.bin").touch()
    with pytest.raises(ConfigError, match=r"m\.bin is a file; give a GGUF file or a checkpoint's"):
        model("m.bin")


def test_a_download_that_is_switched_off_names_the_switch(monkeypatch, tmp_path):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with pytest.raises(ConfigError, match="not in the cache and HF_HUB_OFFLINE is set; unset it"):
        _ = model("ada/other").folder


RESPONSE = httpx.Response(403, request=httpx.Request("GET", "https://huggingface.co"))


@pytest.mark.parametrize(
    ("error", "fix"),
    [
        (errors.GatedRepoError("no", response=RESPONSE), "accept the licence on https://"),
        (errors.RepositoryNotFoundError("no", response=RESPONSE), "no such repository"),
        (errors.RevisionNotFoundError("no", response=RESPONSE), "no revision 'v2'"),
        (errors.DisabledRepoError("no", response=RESPONSE), "disabled by the hub"),
        (errors.HFValidationError("no"), "not a hub id"),
        (errors.LocalEntryNotFoundError("no"), "cannot be reached; check the network"),
        (errors.IncompleteSnapshotError("no", "folder"), "incomplete in the cache"),
        (OSError(errno.ENOSPC, "no"), "the disk is full"),
        (OSError("what else"), "the download failed: what else"),
    ],
    ids=lambda case: type(case).__name__,
)
def test_a_failed_download_tells_why_and_what_to_do(monkeypatch, tmp_path, error, fix):
    def fail(*args, **kwargs):
        raise error

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("huggingface_hub.snapshot_download", fail)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
    with pytest.raises(ConfigError) as caught:
        _ = model("ada/other@v2").folder
    assert str(caught.value).startswith("model.path='ada/other@v2': ")
    assert fix in str(caught.value)


UNWANTED = ("README.md", "model.gguf", "modeling.py", "original/consolidated.safetensors")


@pytest.fixture
def hub(tmp_path):
    """A hub of a target and a draft, both with files that no engine reads."""
    make_target(tmp_path / "target")
    make_eagle3(tmp_path / "draft", tmp_path / "target")
    hub = FakeHub()
    for name in ("target", "draft"):
        for unwanted in UNWANTED:
            file = tmp_path / name / unwanted
            file.parent.mkdir(exist_ok=True)
            file.write_text("no engine reads this")
        hub.add(f"ada/{name}", tmp_path / name, revisions=("main", "v2"))
    yield hub
    hub.close()


def check_config(hub, folder, *arguments):
    """Run the command where nothing is cached but what it downloads itself."""
    environment = {key: value for key, value in os.environ.items() if not key.startswith("HF_")}
    return subprocess.run(
        [sys.executable, "-m", "serve_spec", "check-config", *arguments],
        env={**environment, "HF_ENDPOINT": hub.url, "HF_HOME": str(folder / "home")},
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=120,
    )


def test_a_target_and_a_draft_are_downloaded_by_id_without_files_that_are_not_needed(hub, tmp_path):
    (tmp_path / "here").mkdir()
    draft = ["--speculative-draft-model-path", "ada/draft"]
    done = check_config(hub, tmp_path / "here", "ada/target@v2", *draft)
    assert done.returncode == 0, done.stderr
    assert "speculative_algorithm: EAGLE3" in done.stdout
    for name in ("target", "draft"):
        cached = tmp_path / f"here/home/hub/models--ada--{name}/snapshots" / COMMIT
        files = {file.name for file in cached.rglob("*")}
        assert {"config.json", "model.safetensors"} <= files
        assert not files & {Path(unwanted).name for unwanted in UNWANTED}
        for file in files:
            assert (cached / file).read_bytes() == (tmp_path / name / file).read_bytes()
    assert not [path for path in hub.asked if path.endswith(UNWANTED)]
    hub.asked.clear()
    again = check_config(hub, tmp_path / "here", f"ada/target@{COMMIT}", *draft)
    assert again.returncode == 0, again.stderr
    assert hub.asked == ["/api/models/ada/draft/revision/main?expand=sha"]
    hub.commit = "f" * 40
    newer = check_config(hub, tmp_path / "here", "ada/target@v2", *draft)
    assert newer.stdout.count(f"@{hub.commit}\n") == 2, newer.stderr


@pytest.mark.parametrize(
    ("name", "fix"),
    [
        ("ada/gated", "gated; accept the licence on {url}/ada/gated, then set HF_TOKEN"),
        ("ada/asked", "gated; accept the licence on {url}/ada/asked, then set HF_TOKEN"),
        ("ada/typo", "no such folder, and the hub has no such repository or it is private"),
        ("ada/target@v3", "the repository has no revision 'v3'; see {url}/ada/target/tree/main"),
    ],
)
def test_what_the_hub_refuses_is_one_line_that_tells_what_to_do(
    hub, tmp_path, monkeypatch, capsys, name, fix
):
    use_cache(monkeypatch, tmp_path / "empty")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
    monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", hub.url)
    monkeypatch.chdir(tmp_path)
    hub.add("ada/gated", tmp_path, error=(401, "GatedRepo"))
    hub.add("ada/asked", tmp_path, error=(403, "GatedRepo"))
    assert cli.main(["check-config", name]) == 1
    told = capsys.readouterr().err
    assert told.startswith(f"model.path={name!r}: {fix.format(url=hub.url)}")
    assert told.count("\n") == 1


def test_of_gguf_files_one_is_downloaded_that_is_alone_or_named(hub, tmp_path):
    pytest.importorskip("gguf", reason="the extra gguf is not installed")
    from tests.helpers.gguf import write_gguf

    for name, kinds in (("one", ["F32"]), ("many", ["F16", "Q8_0"])):
        (tmp_path / name).mkdir()
        (tmp_path / name / "README.md").write_text("no engine reads this")
        for kind in kinds:
            write_gguf(tmp_path / name / f"m-{kind}.gguf", tmp_path / "target", kind, shards=2)
        hub.add(f"ada/{name}", tmp_path / name)
    (tmp_path / "here").mkdir()

    def cached(name):
        folder = tmp_path / f"here/home/hub/models--ada--{name}/snapshots" / COMMIT
        return sorted(file.name for file in folder.rglob("*"))

    assert (found := check_config(hub, tmp_path / "here", "ada/one")).returncode == 0, found.stderr
    assert cached("one") == ["m-F32-00001-of-00002.gguf", "m-F32-00002-of-00002.gguf"]
    for name, why in (
        ("ada/many", "several GGUF files (m-F16-00001-of-00002.gguf, m-Q8_0-00001-of-00002.gguf)"),
        ("ada/many:Q4_0", "no GGUF file 'Q4_0'; there are m-F16-00001-of-00002.gguf, m-F16-00002"),
    ):
        found = check_config(hub, tmp_path / "here", name)
        assert found.returncode == 1
        assert found.stderr.startswith(f"model.path='{name}@{COMMIT}': {why}")
        assert cached("many") == []
    found = check_config(hub, tmp_path / "here", "ada/many:q8_0")
    assert found.returncode == 0, found.stderr
    assert f"path: ada/many:q8_0@{COMMIT}" in found.stdout
    assert cached("many") == ["m-Q8_0-00001-of-00002.gguf", "m-Q8_0-00002-of-00002.gguf"]
    num_asked = len(hub.asked)
    found = check_config(hub, tmp_path / "here", f"ada/many:q8_0@{COMMIT}")
    assert found.returncode == 0, found.stderr
    assert len(hub.asked) == num_asked, "all is in the cache"
