"""A cache of the Hugging Face hub, made by hand, as a download would leave it."""

import shutil

COMMIT = "0123456789abcdef0123456789abcdef01234567"


def add_repository(cache, name, folder, commit=COMMIT):
    """Put the files of `folder` into `cache` as the branch main of a repository."""
    repository = cache / f"models--{name.replace('/', '--')}"
    (repository / "refs").mkdir(parents=True, exist_ok=True)
    (repository / "refs" / "main").write_text(commit)
    return shutil.copytree(folder, repository / "snapshots" / commit)


def use_cache(monkeypatch, cache):
    """Let this process find nothing but what `cache` holds."""
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(cache))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
