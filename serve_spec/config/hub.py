"""Folders of checkpoints: local ones, package data, and downloads from the Hugging Face hub."""

from __future__ import annotations

import errno
from pathlib import Path
from typing import Any

from serve_spec.config.base import ASSET, ConfigError, locate

# Config, tokenizer and chat template; a router reads no more.
_METADATA = ["*.json", "*.model", "*.txt", "*.jinja", "tokenizer*"]
_SAFETENSORS = [*_METADATA, "*.safetensors"]
_PICKLES = [*_METADATA, "*.bin"]
# The same weights in formats of other programs.
_IGNORED = ["original/*", "metal/*", "onnx/*", "consolidated*", "*.gguf", "*.onnx"]


def checkpoint_folder(
    field: str,
    name: str,
    *,
    download_dir: Path | None = None,
    weights: bool = True,
    progress: bool = False,
) -> Path:
    """Return the local folder of a checkpoint; download what the cache lacks, or raise ConfigError.

    field: the dotted key that names it, for messages.
    name: a folder, `asset:NAME`, or `ORG/NAME[@REVISION]` of the hub.
    download_dir: cache to use instead of HF_HUB_CACHE.
    weights: whether the weights are needed, or only config and tokenizer.
    progress: whether to show progress bars on stderr.
    """
    if name.startswith(ASSET):
        return locate(field, name, Path.cwd())
    if Path(name).is_absolute():
        return Path(name)
    if not weights:
        return _download(field, name, download_dir, _METADATA, progress)
    folder = _download(field, name, download_dir, _SAFETENSORS, progress)
    if not any(folder.glob("*.safetensors")):
        folder = _download(field, name, download_dir, _PICKLES, progress)
    return folder


def pinned(field: str, name: str, download_dir: Path | None = None) -> str:
    """Return `ORG/NAME@COMMIT` of a hub id, so that all replicas run the same weights."""
    if name.startswith(ASSET) or Path(name).is_absolute():
        return name
    folder = _download(field, name, download_dir, ["config.json"], progress=False)
    return f"{name.partition('@')[0]}@{folder.name}"


def cached_file(name: str, file: str, download_dir: Path | None = None) -> Path | None:
    """Return a file of `ORG/NAME[@REVISION]` in the cache of the hub, without any request."""
    from huggingface_hub import try_to_load_from_cache
    from huggingface_hub.errors import HFValidationError

    repository, _, revision = name.partition("@")
    try:
        found = try_to_load_from_cache(
            repository, file, cache_dir=download_dir, revision=revision or None
        )
    except HFValidationError:
        return None
    return Path(found) if isinstance(found, str) else None


def _download(
    field: str, name: str, download_dir: Path | None, patterns: list[str], progress: bool
) -> Path:
    from huggingface_hub import snapshot_download  # takes half a second to import
    from huggingface_hub.utils.tqdm import tqdm

    class Bar(tqdm):  # type: ignore[misc,type-arg,unused-ignore]
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            kwargs["disable"] = not progress or None
            super().__init__(*args, **kwargs)  # type: ignore[no-untyped-call]

    repository, _, revision = name.partition("@")
    try:
        return Path(
            snapshot_download(
                repository,
                revision=revision or None,
                cache_dir=download_dir,
                allow_patterns=patterns,
                ignore_patterns=_IGNORED,
                tqdm_class=Bar,
            )
        )
    except (OSError, ValueError) as error:
        raise ConfigError(f"{field}={name!r}: {_reason(error, repository, revision)}") from error


def _reason(error: Exception, repository: str, revision: str) -> str:
    """Return what went wrong with a download, and what to do."""
    from huggingface_hub import constants, errors

    page = f"{constants.ENDPOINT}/{repository}"
    if isinstance(error, errors.GatedRepoError):
        return f"gated; accept the licence on {page}, then set HF_TOKEN or `hf auth login`"
    if isinstance(error, errors.RevisionNotFoundError):
        return f"the repository has no revision {revision!r}; see {page}/tree/main for its branches"
    if isinstance(error, errors.DisabledRepoError):
        return f"the repository is disabled by the hub; see {page}"
    if isinstance(error, errors.RepositoryNotFoundError):
        return (
            f"no such folder, and the hub has no such repository or it is private; check the name "
            f"on {page}, or set HF_TOKEN or run `hf auth login` if it is private"
        )
    if isinstance(error, errors.HFValidationError):
        return f"not a hub id ({error}); give ORG/NAME, or a folder that exists"
    if isinstance(error, errors.LocalEntryNotFoundError | errors.OfflineModeIsEnabled):
        # Older releases of the library do not have this class.
        is_part = type(error).__name__ == "IncompleteSnapshotError"
        state = "is incomplete in the cache" if is_part else "is not in the cache"
        if constants.HF_HUB_OFFLINE:
            why = f"it {state} and HF_HUB_OFFLINE is set; unset it to download"
        else:
            why = f"it {state} and {constants.ENDPOINT} cannot be reached; check the network"
        return f"no such folder, {why}, or copy the files here and give their folder"
    if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
        return "the disk is full; free space, or give another disk with --download-dir or HF_HOME"
    return f"the download failed: {error}"
