"""Corpus: permissively licensed Python source found on the machine, with a manifest.

Only token ids are written to the work folder, and the manifest (names, versions, licences, counts);
the text itself stays in memory.
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

from recipes.tiny.licences import check_licence
from recipes.tiny.settings import CorpusLimits

STDLIB = "python-standard-library"
# Copies of other packages: the distribution does not declare their licence.
_VENDORED = frozenset(
    {"_vendor", "vendor", "vendored", "_vendored", "third_party", "extern", "externals", "_extern"}
)
_EXCLUDED_PACKAGES = frozenset({"serve-spec"})


@dataclass(frozen=True)
class Source:
    """One package and its files."""

    name: str
    version: str
    licence: str
    paths: tuple[Path, ...]


@dataclass
class PackageEntry:
    """Manifest row of one package: number and size of its files."""

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
        """Return totals, one row per package, and refused packages with the reason."""
        used = [package for package in self.packages if package.files]
        totals = {
            name: {
                "packages": len(rows),
                "files": sum(package.files for package in rows),
                "bytes": sum(package.bytes for package in rows),
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
            "packages": [asdict(package) for package in sorted(used, key=lambda e: e.name)],
            "refused": dict(sorted(self.refused.items())),
        }


def find_sources() -> tuple[list[Source], dict[str, str]]:
    """Return the standard library and installed distributions with a permissive licence.

    Also, per refused package, its licence or "unknown".
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
        licence = check_licence(
            meta.get("License-Expression"), meta.get_all("Classifier") or [], meta.get("License")
        )
        if not licence.accepted:
            refused[name] = licence.name[:80]
            continue
        paths = tuple(
            Path(str(dist.locate_file(f)))
            for f in dist.files or []
            if f.suffix == ".py" and ".." not in f.parts and not _VENDORED & set(f.parts)
        )
        accepted.append(Source(name, dist.version, licence.name[:80], paths))
    return accepted, refused


def _standard_library() -> Source:
    root = Path(sysconfig.get_paths()["stdlib"])
    skip = {"site-packages", "dist-packages", "_bundled"} | _VENDORED
    paths = (p for p in root.rglob("*.py") if not skip & set(p.relative_to(root).parts))
    return Source(STDLIB, sys.version.split()[0], "PSF-2.0", tuple(paths))


def build_corpus(
    sources: Sequence[Source], refused: dict[str, str], limits: CorpusLimits, seed: int
) -> Corpus:
    """Read, filter and deduplicate files.

    Held-out packages are read first, so that copies of their files in other packages are dropped.
    """
    corpus = Corpus(refused=refused)
    seen: set[bytes] = set()
    ordered = sorted(sources, key=lambda s: (s.name not in limits.held_out, s.name))
    for source in ordered:
        package = PackageEntry(
            source.name, source.version, source.licence, source.name in limits.held_out
        )
        texts = corpus.held_out if package.held_out else corpus.train
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
            package.files += 1
            package.bytes += len(raw)
        corpus.packages.append(package)
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
    """Return the text of one file, or None if it is missing or not UTF-8."""
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError):
        return None


def write_manifest(corpus: Corpus, path: Path, token_counts: dict[str, int]) -> None:
    """Write corpus.json: the manifest plus the token counts of both sets."""
    record = {"tokens": token_counts, **corpus.manifest()}
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
