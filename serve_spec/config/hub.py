"""Folders of checkpoints: local ones, package data, and downloads from the Hugging Face hub."""

from __future__ import annotations

import errno
import json
import logging
import math
import re
import time
from collections.abc import Callable
from functools import cache, partial
from pathlib import Path
from threading import Thread
from typing import Any, NamedTuple

from serve_spec.config.base import ASSET, ConfigError, locate
from serve_spec.config.gguf import (
    SUFFIX,
    GGUFError,
    find_gguf,
    gguf_folder,
    named_models,
    only_model,
    shard_names,
)
from serve_spec.log import get_logger

# Config, tokenizer and chat template; a router reads no more.
_METADATA = ["*.json", "*.model", "*.txt", "*.jinja", "tokenizer*"]
_SAFETENSORS = [*_METADATA, "*.safetensors"]
_PICKLES = [*_METADATA, "*.bin"]
# The same weights in formats of other programs.
_IGNORED = ["original/*", "metal/*", "onnx/*", "consolidated*", "*.gguf", "*.onnx"]
_VOCABULARIES = ("tokenizer.json", "tokenizer.model", "vocab.json")
_COMMIT = re.compile(r"[0-9a-f]{40}")

_TIMEOUT_S = 10.0
"""Time for the hub to name the commit of a branch."""

_ASK_AGAIN_S = 60.0
"""Time for which an answer of the hub holds, and for which one that is silent is not asked."""

_answers: dict[tuple[str, ...], tuple[float, str | Exception]] = {}
"""Time and answer by endpoint, repository and revision; a silent hub by endpoint alone."""


class _HubName(NamedTuple):
    """The parts of `ORG/NAME[:GGUF][@REVISION]`. variant: which GGUF file of several."""

    repository: str
    variant: str | None
    revision: str


def _split(name: str) -> _HubName:
    named, _, revision = name.partition("@")
    repository, _, variant = named.partition(":")
    return _HubName(repository, variant or None, revision)


def checkpoint_folder(
    field: str,
    name: str,
    *,
    download_dir: Path | None = None,
    weights: bool = True,
    progress: bool = False,
) -> Path:
    """Return the local folder of a checkpoint; download what the cache lacks, or raise ConfigError.

    A commit that is in the cache needs no network. For a branch the hub is asked for its commit,
    once; if it cannot be reached the cached commit is used, with a warning.

    field: the dotted key that names it, for messages.
    name: a folder, a GGUF file, `asset:NAME`, or `ORG/NAME[:GGUF][@REVISION]` of the hub.
    download_dir: cache to use instead of HF_HUB_CACHE.
    weights: whether the weights are needed, or only config and tokenizer.
    progress: whether to show progress bars on stderr.
    """
    if name.startswith(ASSET) or Path(name).is_absolute():
        return _local_folder(field, name)
    if _split(name).variant is not None:
        return _gguf_download(field, name, download_dir, progress)
    is_complete = _has_weights if weights else _has_metadata
    for patterns in (_SAFETENSORS, _PICKLES) if weights else (_METADATA,):
        folder = _download(field, name, download_dir, patterns, is_complete, progress)
        if is_complete(folder) or any(folder.glob("*.safetensors")):
            return folder
    return _gguf_download(field, name, download_dir, progress, otherwise=folder)


def _local_folder(field: str, name: str) -> Path:
    """Return the folder of a checkpoint on this machine; that of a GGUF model is in the cache."""
    found = locate(field, name, Path.cwd()) if name.startswith(ASSET) else Path(name)
    try:
        files = find_gguf(found)
        return gguf_folder(files) if files else found
    except GGUFError as error:
        raise ConfigError(f"{field}={name!r}: {error}") from None


def pinned(field: str, name: str, download_dir: Path | None = None) -> str:
    """Return `ORG/NAME@COMMIT` of a hub id, so that all replicas run the same weights."""
    if name.startswith(ASSET) or Path(name).is_absolute():
        return name
    return f"{name.partition('@')[0]}@{config_folder(field, name, download_dir).name}"


def config_folder(field: str, name: str, download_dir: Path | None = None) -> Path:
    """Return `checkpoint_folder`; of a hub id only config.json is downloaded."""
    if name.startswith(ASSET) or Path(name).is_absolute():
        return checkpoint_folder(field, name)
    return _download(
        field, name, download_dir, ["config.json"], _has_config_or_gguf, progress=False
    )


def cached_file(name: str, file: str, download_dir: Path | None = None) -> Path | None:
    """Return a file of `ORG/NAME[@REVISION]` in the cache of the hub, without any request."""
    from huggingface_hub import try_to_load_from_cache
    from huggingface_hub.errors import HFValidationError

    repository, _, revision = _split(name)
    try:
        found = try_to_load_from_cache(
            repository, file, cache_dir=download_dir, revision=revision or None
        )
    except HFValidationError:
        return None
    return Path(found) if isinstance(found, str) else None


def _has_config(folder: Path) -> bool:
    return (folder / "config.json").is_file()


def _has_config_or_gguf(folder: Path) -> bool:
    return _has_config(folder) or any(folder.rglob(f"*{SUFFIX}"))


def _has_metadata(folder: Path) -> bool:
    # Releases of the library before 1.0 keep no list by which it sees that a download broke off.
    return _has_config(folder) and any((folder / name).is_file() for name in _VOCABULARIES)


def _has_weights(folder: Path) -> bool:
    for index in folder.glob("*.index.json"):
        try:
            shards = json.loads(index.read_text())["weight_map"].values()
        except (OSError, ValueError, KeyError, AttributeError):
            return False
        return all((folder / shard).is_file() for shard in shards)
    return _has_config(folder) and any(
        any(folder.glob(f"*.{end}")) for end in ("safetensors", "bin")
    )


def _download(
    field: str,
    name: str,
    download_dir: Path | None,
    patterns: list[str],
    is_complete: Callable[[Path], bool],
    progress: bool,
) -> Path:
    """Return the folder of a snapshot: the cached one if it is complete and new, or a new one."""
    from huggingface_hub import constants, errors

    repository, _, revision = _split(name)
    snapshot = partial(_snapshot, repository, revision, download_dir, patterns, progress)
    try:
        try:
            cached = snapshot(local_files_only=True)
        except errors.LocalEntryNotFoundError:
            cached = None
        found = cached if cached is not None and is_complete(cached) else None
        if found is not None and _COMMIT.fullmatch(revision):
            return found
        commit = _commit(repository, revision or "main")
        if isinstance(commit, str):
            return found if found and found.name == commit else snapshot(local_files_only=False)
        if isinstance(commit, errors.HfHubHTTPError):
            if found is None or isinstance(commit, errors.RevisionNotFoundError):
                raise commit
            _warn(f"{field}={name!r}: {_reason(commit, repository, revision)}")
            return found
        folder = snapshot(local_files_only=True)
        if not isinstance(commit, errors.OfflineModeIsEnabled):
            _warn(f"{constants.ENDPOINT} cannot be reached ({commit!r})")
        return folder
    except Exception as error:  # those of the HTTP library depend on the release
        raise ConfigError(f"{field}={name!r}: {_reason(error, repository, revision)}") from error


def _gguf_download(
    field: str,
    name: str,
    download_dir: Path | None,
    progress: bool,
    otherwise: Path | None = None,
) -> Path:
    """Return the folder of the GGUF model in a repository, which is downloaded whole.

    otherwise: returned for a repository without GGUF files; None: it is refused.
    """
    commit = config_folder(field, name, download_dir)
    repository, variant, revision = _split(name)
    cached = sorted(file.relative_to(commit).as_posix() for file in commit.rglob(f"*{SUFFIX}"))
    try:
        # One commit never changes, and its files are in the cache because they were chosen.
        names = cached if cached and _COMMIT.fullmatch(revision) else None
        names = names or _listed(repository, commit.name) or cached
        if not names and otherwise is not None:
            return otherwise
        wanted = shard_names(only_model(named_models(names, variant) if variant else names))

        def is_complete(folder: Path) -> bool:
            return all((folder / file).is_file() for file in wanted)

        folder = _download(field, name, download_dir, wanted, is_complete, progress)
        return gguf_folder([folder / file for file in wanted])
    except GGUFError as error:
        raise ConfigError(f"{field}={name!r}: {error}") from None


@cache
def _listed(repository: str, commit: str) -> list[str]:
    """Return the GGUF files of a repository; none if the hub does not answer."""
    from huggingface_hub import HfApi

    try:
        files = HfApi().list_repo_files(repository, revision=commit)
    except Exception:  # of the HTTP library, which depends on the release
        return []
    return sorted(file for file in files if file.endswith(SUFFIX))


def _snapshot(
    repository: str,
    revision: str,
    download_dir: Path | None,
    patterns: list[str],
    progress: bool,
    *,
    local_files_only: bool,
) -> Path:
    from huggingface_hub import snapshot_download  # takes half a second to import
    from huggingface_hub.utils.tqdm import tqdm

    class Bar(tqdm):  # type: ignore[misc,type-arg,unused-ignore]
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            kwargs["disable"] = not progress or None
            super().__init__(*args, **kwargs)  # type: ignore[no-untyped-call]

    logging.getLogger("huggingface_hub._snapshot_download").addFilter(_has_matches)
    return Path(
        snapshot_download(
            repository,
            revision=revision or None,
            cache_dir=download_dir,
            allow_patterns=patterns,
            ignore_patterns=None if patterns[0].endswith(SUFFIX) else _IGNORED,
            local_files_only=local_files_only,
            tqdm_class=Bar,
        )
    )


def _has_matches(record: logging.LogRecord) -> bool:
    """Drop the warning that no file matches, since others are looked for then."""
    return not record.getMessage().startswith("No files matched")


def _commit(repository: str, revision: str) -> str | Exception:
    """Return the present commit of a branch, or why it is not known; the hub is asked once."""
    from huggingface_hub import constants, errors

    if constants.HF_HUB_OFFLINE:
        return errors.OfflineModeIsEnabled("HF_HUB_OFFLINE is set")
    hub, question = (constants.ENDPOINT,), (constants.ENDPOINT, repository, revision)
    for key in (hub, question):
        since, known = _answers.get(key, (-math.inf, ""))
        if time.monotonic() - since < _ASK_AGAIN_S:
            return known
    answer = _ask(repository, revision)
    is_answered = isinstance(answer, str | errors.HfHubHTTPError)
    _answers[question if is_answered else hub] = time.monotonic(), answer
    return answer


def _ask(repository: str, revision: str) -> str | Exception:
    from huggingface_hub import HfApi

    answers: list[str | Exception] = []

    def ask() -> None:
        try:
            info = HfApi().model_info(
                repository, revision=revision, timeout=_TIMEOUT_S, expand=["sha"]
            )
            answers.append(str(info.sha))
        except Exception as error:  # of the HTTP library, which depends on the release
            answers.append(error)

    # The timeout of a request does not bound the look-up of the name.
    thread = Thread(target=ask, daemon=True)
    thread.start()
    thread.join(_TIMEOUT_S)
    return answers[0] if answers else TimeoutError(f"no answer within {_TIMEOUT_S:g} s")


@cache
def _warn(why: str) -> None:
    get_logger(__name__).warning("%s; the checkpoint in the cache is used, as old as it is", why)


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
