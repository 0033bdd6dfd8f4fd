"""Grammar masks of a round's draws, along the drafts of each request."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import repeat, takewhile
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from serve_spec.core.grammar import Grammar
from serve_spec.core.plan import ScheduledRequest
from serve_spec.core.request import SamplingParams
from serve_spec.log import get_logger
from serve_spec.structured.compiler import GrammarCompiler, Mask, Matcher


class Node(NamedTuple):
    """A draft: whether it can be drawn, and the mask of the draw after it (None: not needed)."""

    is_legal: bool
    mask: Mask | None = None


_ILLEGAL = Node(is_legal=False)
_LAST = Node(is_legal=True)  # or one that needs no mask


def follow(
    matcher: Matcher,
    root: Mask,
    token_ids: Sequence[int],
    parents: Sequence[int],
    ends: Mask,
    mask_at: Callable[[list[int]], Mask],
) -> list[Node]:
    """Return one node per draft; the matcher is restored, unless it has a `problem` now.

    root: mask of the draw after the root. ends: the tokens that end a text; a draft of one, or of
    -1 (no token), is the last of its path.
    token_ids, parents: of each draft, parents before children, -1 for the root.
    mask_at: returns the mask at the matcher's state, after these drafts.
    """
    nodes: list[Node] = []
    path: list[int] = []
    for number, (token, parent) in enumerate(zip(token_ids, parents, strict=True)):
        before = root if parent < 0 else nodes[parent].mask
        if before is None or matcher.problem or not _may_be(before, token):
            nodes.append(_ILLEGAL)
        elif token < 0 or allows(ends, token):
            nodes.append(_LAST)
        else:
            path = _move(matcher, path, [*_ancestors(parents, parent), number], token_ids)
            nodes.append(Node(is_legal=True, mask=mask_at([token_ids[node] for node in path])))
    if not matcher.problem:
        matcher.go_back(len(path))
    return nodes


def allows(mask: Mask, token: int) -> bool:
    """Return whether the mask has the token."""
    return bool(mask[token >> 5] >> (token & 31) & 1)


def _may_be(mask: Mask, token: int) -> bool:
    return token < 0 or allows(mask, token)


def _ancestors(parents: Sequence[int], node: int) -> list[int]:
    found = []
    while node >= 0:
        found.append(node)
        node = parents[node]
    return found[::-1]


def _move(matcher: Matcher, old: list[int], new: list[int], token_ids: Sequence[int]) -> list[int]:
    """Move the matcher from the end of one path to the end of another; return that."""
    same = 0
    while same < min(len(old), len(new)) and old[same] == new[same]:
        same += 1
    matcher.go_back(len(old) - same)
    matcher.advance([token_ids[node] for node in new[same:]])
    return new


class Bans:
    """`bad_token_ids`, `bad_words`, `allowed_token_ids` and `min_tokens` of a request, as masks.

    They do not apply if they forbid every token that a grammar allows. So a complete text may end
    before `min_tokens`.
    """

    def __init__(self, compiler: GrammarCompiler, req: ScheduledRequest) -> None:
        params = req.params
        self._always = compiler.mask_of(params.bad_token_ids)
        if params.allowed_token_ids is not None:
            self._always |= ~compiler.mask_of(params.allowed_token_ids)
        self._held = compiler.mask_of(() if req.edited is None else req.edited.held_ids)
        self._params = params

    def off(self, mask: Mask, generated: Sequence[int], path: Sequence[int]) -> Mask:
        """Return what is left of a mask after the tokens generated: at least one token."""
        is_early = len(generated) + len(path) < self._params.min_tokens
        left = mask & ~(self._always | self._held if is_early else self._always)
        for token in completions(self._params, generated, path):
            left[token >> 5] &= np.uint32(~(1 << (token & 31)) & 0xFFFFFFFF)
        return left if np.any(left) else mask


def completions(params: SamplingParams, generated: Sequence[int], path: Sequence[int]) -> list[int]:
    """Return the tokens that would complete one of `bad_words`, by token ids, after the tokens."""
    before = [
        (tuple(word[:-1]), word[-1]) for word in params.bad_words if not isinstance(word, str)
    ]
    longest = max((len(start) for start, _ in before), default=0)
    text = (*generated[max(0, len(generated) - longest) :], *path)
    return [last for start, last in before if text[len(text) - len(start) :] == start]


logger = get_logger(__name__)


@dataclass(frozen=True)
class RoundMasks:
    """Masks of the draws of a round.

    num_drafts: drafts of each sampling request to verify: those before the first that cannot be
        drawn, unless all are kept.
    places: the row of `words` of each draw of those requests, in order; -1: no mask.
    words: [M, ceil(V / 32)], see `Mask`.
    """

    num_drafts: tuple[int, ...]
    places: tuple[int, ...]
    words: NDArray[np.uint32]


class Grammars:
    """Keeps the grammar states of running requests.

    A state is a function of the grammar and the tokens; keeping it between rounds only saves time.
    So all ranks make equal masks of equal plans.
    """

    def __init__(self, compiler: GrammarCompiler) -> None:
        self.compiler = compiler
        self._texts: dict[str, _Text] = {}

    def check(self, grammar: Grammar) -> None:
        """Compile a grammar, which may take a second. From any thread.

        Raises:
            InvalidRequest: no text matches it, or it cannot be compiled.
        """
        self.compiler.matcher(grammar)

    def read(self, reqs: Sequence[ScheduledRequest]) -> None:
        """Advance the states of a round's sampling requests to their committed tokens."""
        for req in reqs:
            if req.params.grammar is not None:
                self._text(req, req.params.grammar)

    def round_masks(
        self,
        reqs: Sequence[ScheduledRequest],
        drafts: Sequence[Sequence[int]],
        parents: Sequence[Sequence[int]] | None = None,
        *,
        keeps_all: bool = False,
    ) -> RoundMasks:
        """Return the masks of every draw of a round's sampling requests.

        drafts: of each request at least those that are verified. parents: the draft before each,
        counted from 1, 0 for the root; None if no drafts branch. keeps_all: also drafts
        that cannot be drawn, and those after them.
        """
        nodes = [
            self._nodes(req, tokens[: req.num_draft_tokens], above)
            for req, tokens, above in zip(
                reqs, drafts, parents or repeat(None, len(reqs)), strict=True
            )
        ]
        if not keeps_all:
            nodes = [[*takewhile(lambda node: node.is_legal, of_req)] for of_req in nodes]
        masks = [[node.mask for node in of_req] for of_req in nodes]
        here = {req.request_id for req in reqs}
        self._texts = {name: text for name, text in self._texts.items() if name in here}
        flat = [mask for of_req in masks for mask in of_req]
        words = [mask for mask in flat if mask is not None]
        numbers = iter(range(len(words)))
        return RoundMasks(
            num_drafts=tuple(len(of_req) - 1 for of_req in masks),
            places=tuple(-1 if mask is None else next(numbers) for mask in flat),
            words=np.array(words, dtype=np.uint32).reshape(-1, self.compiler.num_words),
        )

    def forget(self, request_id: str) -> None:
        """Drop the state of a request that leaves the batch."""
        self._texts.pop(request_id, None)

    def _nodes(
        self, req: ScheduledRequest, drafts: Sequence[int], parents: Sequence[int] | None
    ) -> list[Node]:
        """Return the nodes of a request's root and of each of its drafts.

        parents: see `round_masks`; of at least as many drafts, or None for a chain.
        """
        grammar = req.params.grammar
        places = [number - 1 for number in (parents or range(len(drafts)))[: len(drafts)]]
        if grammar is None:
            return self._nodes_without_words(req, drafts, places)
        text = self._text(req, grammar)
        matcher = text.matcher

        def left(mask: Mask | None, path: Sequence[int]) -> Mask:
            # A text that cannot continue may end, also if its grammar exceeds the limits.
            mask = self.compiler.ends if mask is None else mask
            return text.bans.off(mask, req.generated_ids, path)

        root = left(text.mask, ())
        nodes = follow(
            matcher,
            root,
            drafts,
            places,
            self.compiler.ends,
            lambda path: left(matcher.mask(), path),
        )
        if matcher.problem:
            logger.warning("request %s: its grammar: %s", req.request_id, matcher.problem)
            self.forget(req.request_id)
        return [Node(is_legal=True, mask=root), *nodes]

    def _nodes_without_words(
        self, req: ScheduledRequest, drafts: Sequence[int], parents: Sequence[int]
    ) -> list[Node]:
        """Return the nodes of a request without a grammar; parents: -1 for the root."""
        if not req.params.bad_words:
            return [Node(is_legal=True)] * (len(drafts) + 1)

        def after(path: Sequence[int]) -> Node:
            if not completions(req.params, req.generated_ids, path):
                return _LAST
            bans = Bans(self.compiler, req)
            return Node(is_legal=True, mask=bans.off(everything, req.generated_ids, path))

        everything = self.compiler.everything
        nodes = [after(())]
        for number, (token, parent) in enumerate(zip(drafts, parents, strict=True)):
            above = nodes[parent + 1]
            if not above.is_legal or (above.mask is not None and not _may_be(above.mask, token)):
                nodes.append(_ILLEGAL)
            else:
                path = [*_ancestors(parents, parent), number]
                nodes.append(after([drafts[node] for node in path]))
        return nodes

    def _text(self, req: ScheduledRequest, grammar: Grammar) -> _Text:
        text = self._texts.get(req.request_id)
        if text is None or not text.goes_on_to(grammar, req.generated_ids):
            text = _Text(grammar, self.compiler.matcher(grammar), Bans(self.compiler, req))
        text.read(req.generated_ids)
        if text.matcher.problem:  # possibly a limit that all texts of this grammar share
            matcher = self.compiler.matcher(grammar, anew=True)
            text = _Text(grammar, matcher, text.bans)
            text.read(req.generated_ids)
        self._texts[req.request_id] = text
        return text


@dataclass
class _Text:
    """A text, its state in its grammar, and the mask of the next draw (see `Matcher`)."""

    grammar: Grammar
    matcher: Matcher
    bans: Bans
    token_ids: tuple[int, ...] = ()
    mask: Mask | None = field(init=False)

    def __post_init__(self) -> None:
        self.mask = self.matcher.mask()

    def goes_on_to(self, grammar: Grammar, token_ids: tuple[int, ...]) -> bool:
        """Return whether this text is a prefix of `token_ids`, in the same grammar."""
        return self.grammar == grammar and token_ids[: len(self.token_ids)] == self.token_ids

    def read(self, token_ids: tuple[int, ...]) -> None:
        """Advance to the end of `token_ids`, of which this text is a prefix."""
        if token_ids != self.token_ids:
            self.matcher.advance(token_ids[len(self.token_ids) :])
            self.token_ids, self.mask = token_ids, self.matcher.mask()
