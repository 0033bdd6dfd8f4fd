"""Selection of packages for the training corpus by licence.

Only permissive licences are accepted; copyleft, proprietary and unknown ones are refused.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

PERMISSIVE = frozenset(
    {
        *("MIT", "MIT-0", "MIT-CMU", "HPND", "BSD", "BSD-2-Clause", "BSD-3-Clause"),
        *("Apache-2.0", "ISC", "PSF-2.0", "Python-2.0", "Python-2.0.1", "CNRI-Python"),
        *("Zlib", "0BSD", "Unlicense", "CC0-1.0", "BSL-1.0", "NCSA"),
    }
)
EXCEPTIONS = frozenset({"LLVM-exception"})

# Free text and classifier names seen in distribution metadata, lower case, "license" removed.
_ALIASES = {
    "mit": "MIT",
    "the mit": "MIT",
    "expat": "MIT",
    "bsd": "BSD",
    "new bsd": "BSD-3-Clause",
    "modified bsd": "BSD-3-Clause",
    "bsd 3-clause": "BSD-3-Clause",
    "3-clause bsd": "BSD-3-Clause",
    "bsd 3 clause": "BSD-3-Clause",
    "bsd-3": "BSD-3-Clause",
    "bsd-3-clause": "BSD-3-Clause",
    "bsd-2-clause": "BSD-2-Clause",
    "bsd 2-clause": "BSD-2-Clause",
    "2-clause bsd": "BSD-2-Clause",
    "simplified bsd": "BSD-2-Clause",
    "apache": "Apache-2.0",
    "apache 2": "Apache-2.0",
    "apache 2.0": "Apache-2.0",
    "apache-2": "Apache-2.0",
    "apache-2.0": "Apache-2.0",
    "apache, version 2.0": "Apache-2.0",
    "apache version 2.0": "Apache-2.0",
    "apache software": "Apache-2.0",
    "apache software 2.0": "Apache-2.0",
    "isc": "ISC",
    "isc (iscl)": "ISC",
    "psf": "PSF-2.0",
    "psfl": "PSF-2.0",
    "python software foundation": "PSF-2.0",
    "zlib": "Zlib",
    "zlib/libpng": "Zlib",
    "0bsd": "0BSD",
    "bsd zero clause (0bsd)": "0BSD",
    "unlicense": "Unlicense",
    "the unlicense (unlicense)": "Unlicense",
    "mit no attribution (mit-0)": "MIT-0",
    "historical permission notice and disclaimer (hpnd)": "HPND",
    "cmu (mit-cmu)": "MIT-CMU",
    "cc0 1.0 universal (cc0 1.0) public domain dedication": "CC0-1.0",
}
_REFUSED_WORDS = re.compile(
    r"\b(a?gpl|lgpl|gnu|mpl|mozilla|epl|eclipse|cddl|eupl|osl|copyleft|proprietary|commercial"
    r"|nvidia|non-?commercial|cc-by|sspl|busl)",
    re.IGNORECASE,
)
# A licence field longer than this is a licence text, not a name.
_NAME_CHARS = 120


@dataclass(frozen=True)
class Decision:
    """Decision for one package: `name` is the licence, or the reason of a refusal."""

    accepted: bool
    name: str


def check_licence(
    expression: str | None, classifiers: Sequence[str], field: str | None
) -> Decision:
    """Return the decision from `License-Expression`, trove classifiers, then `License`."""
    if expression:
        return _check_expression(expression)
    short = (field or "").strip()
    if len(short) > _NAME_CHARS:
        short = ""
    if _REFUSED_WORDS.search(short):
        return Decision(False, short)
    names = [c.split("::")[-1].strip() for c in classifiers if c.startswith("License ::")]
    names = [n for n in names if n != "OSI Approved"]
    if names:
        return _check_names(names)
    return _check_names([short]) if short else Decision(False, "unknown")


def _check_names(names: Sequence[str]) -> Decision:
    """Return the decision on several names, which must all be permissive."""
    results = [_check_expression(_canonical(name)) for name in names]
    joined = " AND ".join(result.name for result in results)
    return Decision(all(result.accepted for result in results), joined)


def _canonical(name: str) -> str:
    """SPDX identifier of a free-text name when it is known, else the name itself."""
    key = re.sub(r"\s*\blicen[sc]ed?\b", "", name.strip().lower()).strip(" .,")
    return _ALIASES.get(key, name.strip())


def _check_expression(expression: str) -> Decision:
    tokens = re.findall(r"\(|\)|[^\s()]+", expression)
    try:
        accepted, rest = _parse_or(tokens)
    except IndexError:
        return Decision(False, expression)
    return Decision(accepted and not rest, expression)


def _parse_or(tokens: list[str]) -> tuple[bool, list[str]]:
    accepted, rest = _parse_and(tokens)
    while rest and rest[0].upper() == "OR":
        other, rest = _parse_and(rest[1:])
        accepted = accepted or other
    return accepted, rest


def _parse_and(tokens: list[str]) -> tuple[bool, list[str]]:
    accepted, rest = _parse_atom(tokens)
    while rest and rest[0].upper() == "AND":
        other, rest = _parse_atom(rest[1:])
        accepted = accepted and other
    return accepted, rest


def _parse_atom(tokens: list[str]) -> tuple[bool, list[str]]:
    if tokens[0] == "(":
        accepted, rest = _parse_or(tokens[1:])
        if rest[0] != ")":
            return False, rest
        return accepted, rest[1:]
    accepted, rest = tokens[0] in PERMISSIVE, tokens[1:]
    if rest and rest[0].upper() == "WITH":
        return accepted and rest[1] in EXCEPTIONS, rest[2:]
    return accepted, rest
