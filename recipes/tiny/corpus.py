"""Corpus: permissively licensed Python source found on the machine, with a manifest.

The text itself never leaves memory: only token ids go to the work folder and only the manifest
(names, versions, licences, counts) goes anywhere else.
"""

from __future__ import annotations

import hashlib
import json
import random
import re
import sys
import sysconfig
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from email.message import Message
from importlib import metadata
from pathlib import Path
from typing import cast

from recipes.tiny.licences import judge
from recipes.tiny.settings import CorpusLimits

STDLIB = "python-standard-library"
# Copies of other people's packages: their licence is not the one the distribution declares.
_VENDORED = frozenset(
    {"_vendor", "vendor", "vendored", "_vendored", "third_party", "extern", "externals", "_extern"}
)
_EXCLUDED_PACKAGES = frozenset({"serve-spec"})


@dataclass(frozen=True)
class Source:
    """One package and the files it offers."""

    name: str
    version: str
    licence: str
    paths: tuple[Path, ...]


@dataclass
class PackageEntry:
    """Manifest row: what was taken from one package."""

    name: str
    version: str
    licence: str
    held_out: bool
    files: int = 0
    bytes: int = 0


@dataclass
class Corpus:
    """Texts of the training and held-out sets, and the manifest rows."""

    train: list[str] = field(default_factory=list)
    held_out: list[str] = field(default_factory=list)
    packages: list[PackageEntry] = field(default_factory=list)
    refused: dict[str, str] = field(default_factory=dict)
    duplicates: int = 0

    def manifest(self) -> dict[str, object]:
        """JSON-ready summary: totals, one row per package, refused packages with the reason."""
        used = [entry for entry in self.packages if entry.files]
        totals = {
            name: {
                "packages": len(rows),
                "files": sum(entry.files for entry in rows),
                "bytes": sum(entry.bytes for entry in rows),
            }
            for name, rows in (
                ("train", [e for e in used if not e.held_out]),
                ("held_out", [e for e in used if e.held_out]),
            )
        }
        return {
            "python": sys.version.split()[0],
            "totals": totals,
            "duplicate_files_dropped": self.duplicates,
            "packages": [asdict(entry) for entry in sorted(used, key=lambda e: e.name)],
            "refused": dict(sorted(self.refused.items())),
        }


def find_sources() -> tuple[list[Source], dict[str, str]]:
    """Standard library and every installed distribution with a permissive licence.

    Returns the accepted sources and, per refused package, its licence or "unknown".
    """
    accepted = [_standard_library()]
    refused: dict[str, str] = {}
    seen = set(_EXCLUDED_PACKAGES)
    for dist in metadata.distributions():
        meta = cast(Message, dist.metadata)
        name = re.sub(r"[-_.]+", "-", str(meta.get("Name") or "")).lower()
        if not name or name in seen:
            continue
        seen.add(name)
        verdict = judge(
            meta.get("License-Expression"), meta.get_all("Classifier") or [], meta.get("License")
        )
        if not verdict.accepted:
            refused[name] = verdict.name[:80]
            continue
        paths = tuple(
            Path(str(dist.locate_file(f)))
            for f in dist.files or []
            if f.suffix == ".py" and ".." not in f.parts and not _VENDORED & set(f.parts)
        )
        accepted.append(Source(name, dist.version, verdict.name[:80], paths))
    return accepted, refused


def _standard_library() -> Source:
    root = Path(sysconfig.get_paths()["stdlib"])
    skip = {"site-packages", "dist-packages", "_bundled"} | _VENDORED
    paths = (p for p in root.rglob("*.py") if not skip & set(p.relative_to(root).parts))
    return Source(STDLIB, sys.version.split()[0], "PSF-2.0", tuple(paths))


def build_corpus(
    sources: Sequence[Source], refused: dict[str, str], limits: CorpusLimits, seed: int
) -> Corpus:
    """Read, filter and deduplicate. Held-out packages are read first, so that a copy of a
    held-out file in another package never reaches the training set."""
    corpus = Corpus(refused=refused)
    seen: set[bytes] = set()
    ordered = sorted(sources, key=lambda s: (s.name not in limits.held_out, s.name))
    for source in ordered:
        entry = PackageEntry(
            source.name, source.version, source.licence, source.name in limits.held_out
        )
        texts = corpus.held_out if entry.held_out else corpus.train
        for text in _read_all(sorted(source.paths)):
            if not limits.min_chars < len(text) < limits.max_chars:
                continue
            raw = text.encode("utf-8")
            digest = hashlib.sha256(raw).digest()
            if digest in seen:
                corpus.duplicates += 1
                continue
            seen.add(digest)
            texts.append(text)
            entry.files += 1
            entry.bytes += len(raw)
        corpus.packages.append(entry)
    shuffler = random.Random(seed)
    shuffler.shuffle(corpus.train)
    shuffler.shuffle(corpus.held_out)
    del corpus.train[limits.max_files :]
    return corpus


def _read_all(paths: Sequence[Path]) -> Iterable[str]:
    with ThreadPoolExecutor(max_workers=16) as pool:
        for text in pool.map(_read, paths):
            if text is not None:
                yield text


def _read(path: Path) -> str | None:
    """Text of one file, or None when it is missing or is not UTF-8."""
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError):
        return None


def write_manifest(corpus: Corpus, path: Path, token_counts: dict[str, int]) -> None:
    """Write corpus.json: the manifest plus the token counts of both sets."""
    record = {"tokens": token_counts, **corpus.manifest()}
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
