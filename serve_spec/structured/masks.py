"""Grammar masks of a round's draws, along the drafts of each request."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, field
from functools import partial
from itertools import takewhile
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from serve_spec.core.errors import InvalidRequest
from serve_spec.core.grammar import Grammar
from serve_spec.core.plan import ScheduledRequest
from serve_spec.core.request import SamplingParams
from serve_spec.core.sequence import Sequence as Request
from serve_spec.log import get_logger
from serve_spec.structured.bans import Bans, completions
from serve_spec.structured.compiler import GrammarCompiler, Mask, Matcher
from serve_spec.structured.forced import ForcedText


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
    nodes: list[Node] | None = None,
) -> list[Node]:
    """Return one node per draft; the matcher is restored, unless it has a `problem` now.

    root: mask of the draw after the root. ends: the tokens that end a text; a draft of one, or of
    -1 (no token), is the last of its path.
    token_ids, parents: of each draft, parents before children, -1 for the root.
    mask_at: returns the mask at the matcher's state, after these drafts. It may replace the drafts
    behind them, and their parents.
    nodes: the list to append to, for a thread that does not wait for all.
    """
    nodes = [] if nodes is None else nodes
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


logger = get_logger(__name__)

PATIENCE_S = 0.01
"""Seconds that a step waits for masks before it is planned, and again before verification."""
SLOW_MASK_S = 0.002
"""Seconds of a mask above which it is slow."""
MOST_SLOW_MASKS = 4
"""Slow masks of a request after which it drafts no more. New lexer states may cost some."""
MOST_MASK_S = 0.04
"""Seconds of a mask above which its request fails. The library spends at most half of it on new
lexer states; what takes longer is an ambiguous grammar, whose masks grow with the text."""
_THREADS = max(1, min(4, (os.cpu_count() or 1) // 2))
"""Others would slow the engine's own thread: on two cores, four ambiguous grammars make the longest
step 25 ms longer with one thread, 55 with four."""
_TOKENS_AT_A_TIME = 64
"""Reading so many tokens takes about a millisecond, in which other threads wait."""


@dataclass(frozen=True)
class RoundMasks:
    """Masks of the draws of a round.

    num_drafts: drafts of each sampling request to verify: those before the first that cannot be
        drawn, unless all are kept.
    places: the row of `words` of each draw of those requests, in order; -1: no mask.
    words: [M, ceil(V / 32)], see `Mask`.
    forced: by index, grammar drafts that replace those of a request from a number on; see
        `Grammars.round_masks`.
    late: indices of requests that drew without masks; what they drew is void.
    """

    num_drafts: tuple[int, ...]
    places: tuple[int, ...]
    words: NDArray[np.uint32]
    forced: Mapping[int, tuple[int, tuple[int, ...]]] = field(default_factory=dict)
    late: tuple[int, ...] = ()


class Grammars:
    """Keeps the grammar states of running requests.

    A state is a function of the grammar and the tokens; keeping it between rounds only saves time.

    Masks are made in threads, where the library works without Python's lock. A step does not wait
    for a slow one: its request sits out until it is ready.
    """

    def __init__(self, compiler: GrammarCompiler) -> None:
        self.compiler = compiler
        self.most_drafts = 0  # most grammar drafts of a request
        self._forced = ForcedText(compiler)
        self._texts: dict[str, _Text] = {}
        self._jobs: dict[str, Future[_Text | None]] = {}
        """Of texts that a thread works on; none of them is in `_texts`."""
        self._threads = ThreadPoolExecutor(_THREADS, "masks")

    def check(self, grammar: Grammar) -> None:
        """Compile a grammar, which may take a second. From any thread.

        Raises:
            InvalidRequest: no text matches it, or it cannot be compiled.
        """
        self.compiler.matcher(grammar)

    def prepare(self, running: Sequence[Request]) -> tuple[set[str], dict[str, InvalidRequest]]:
        """Make the masks of the next draws. Call it before a step is planned.

        Return which requests are not ready, and which fail, and why.
        """
        reqs = [seq for seq in running if seq.params.grammar is not None]
        failed: dict[str, InvalidRequest] = {}
        if not reqs:
            return set(), failed
        self._collect(reqs, failed)
        behind = [seq for seq in reqs if not self._is_ready(seq)]
        fresh = [self._start(seq) for seq in behind if seq.request_id not in self._jobs]
        wait(fresh, PATIENCE_S)
        jobs = [self._jobs[seq.request_id] for seq in reqs if seq.request_id in self._jobs]
        if len(jobs) == len(running) and not any(job.done() for job in jobs):
            wait(jobs, PATIENCE_S, FIRST_COMPLETED)  # nothing else can run
        self._collect(reqs, failed)
        return {seq.request_id for seq in reqs if not self._is_ready(seq)}, failed

    def drafts(self, seq: Request) -> tuple[int, ...]:
        """Return the grammar drafts of a request that is ready; none if it has no grammar."""
        return self._texts[seq.request_id].drafts if seq.request_id in self._texts else ()

    def _is_ready(self, seq: Request) -> bool:
        text = self._texts.get(seq.request_id)
        return text is not None and len(text.token_ids) == seq.num_output_tokens

    def _start(self, seq: Request) -> Future[_Text | None]:
        """Let a thread read the newest tokens of a request, and make the mask after them."""
        text, token_ids = self._texts.pop(seq.request_id, None), tuple(seq.output_token_ids)
        job = self._threads.submit(self._advance, seq.params, seq.held_token_ids, text, token_ids)
        self._jobs[seq.request_id] = job
        return job

    def _advance(
        self,
        params: SamplingParams,
        held_ids: Sequence[int],
        text: _Text | None,
        token_ids: tuple[int, ...],
    ) -> _Text | None:
        """Return a text at the end of `token_ids`. Raise InvalidRequest if its grammar is too slow.

        text: a text that may be continued.
        """
        grammar = params.grammar
        assert grammar is not None
        if text is None or not text.goes_on_to(grammar, token_ids):
            text = _Text(
                grammar, self.compiler.matcher(grammar), Bans(self.compiler, params, held_ids)
            )
        text.read(token_ids)
        if text.matcher.exceeds_limits:  # possibly a limit that all texts of this grammar share
            text = _Text(grammar, self.compiler.matcher(grammar, anew=True), text.bans)
            text.read(token_ids)
            if text.matcher.exceeds_limits:
                raise grammar.refusal(f"too complex for this text: {text.matcher.problem}")
        if text.mask_s > MOST_MASK_S:
            took = f"a mask of it takes {text.mask_s * 1e3:.0f} ms, more than {MOST_MASK_S * 1e3:g}"
            raise grammar.refusal(f"{took}; make it less ambiguous, or smaller")
        if self.most_drafts and params.speculative.enabled:
            text.find_drafts(self._forced, self.most_drafts)
        return text

    def _collect(self, reqs: Sequence[Request], failed: dict[str, InvalidRequest]) -> None:
        """Take back the texts that threads are done with."""
        for seq in reqs:
            job = self._jobs.get(seq.request_id)
            if job is None or not job.done():
                continue
            del self._jobs[seq.request_id]
            try:
                text = job.result()
            except InvalidRequest as error:
                failed[seq.request_id] = error
            else:
                if text is not None:
                    self._texts[seq.request_id] = text
                    seq.has_slow_masks |= text.num_slow >= MOST_SLOW_MASKS

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
        Where a model's chain leads to text that the grammar forces, that goes on with its usual
        tokens, up to the size of the request's shape.
        """
        nodes: list[list[Node]] = []
        forced: dict[int, list[tuple[int, tuple[int, ...]]]] = {}
        jobs: dict[int, Future[_Text | None]] = {}
        for number, req in enumerate(reqs):
            token_ids = list(drafts[number][: req.num_draft_tokens - req.room])
            above = range(len(token_ids)) if parents is None else parents[number]
            places = [place - 1 for place in above[: len(token_ids)]]
            if req.params.grammar is None:
                nodes.append(self._nodes_without_words(req, token_ids, places))
                continue
            text = self._text(req, req.params.grammar)
            nodes.append([Node(is_legal=True, mask=text.left(text.mask, ()))])
            if token_ids:
                found = forced[number] = []
                followed = Followed(req, token_ids, places, nodes[number], found)
                follow_drafts = partial(text.follow, followed, self._forced_of(req))
                jobs[number] = self._threads.submit(follow_drafts)
        late = self._wait_for(reqs, jobs)
        nodes = [of_req.copy() for of_req in nodes]  # a late thread may add to its own
        if keeps_all:
            for number in late:
                nodes[number] += [_ILLEGAL] * (
                    reqs[number].num_draft_tokens + 1 - len(nodes[number])
                )
        else:
            nodes = [[*takewhile(lambda node: node.is_legal, of_req)] for of_req in nodes]
        masks = [[node.mask for node in of_req] for of_req in nodes]
        flat = [mask for of_req in masks for mask in of_req]
        words = [mask for mask in flat if mask is not None]
        numbers = iter(range(len(words)))
        return RoundMasks(
            num_drafts=tuple(len(of_req) - 1 for of_req in masks),
            places=tuple(-1 if mask is None else next(numbers) for mask in flat),
            words=np.array(words, dtype=np.uint32).reshape(-1, self.compiler.num_words),
            forced={number: found[0] for number, found in forced.items() if found},
            late=tuple(late) if keeps_all else (),
        )

    def forget(self, request_id: str) -> None:
        """Drop the state of a request that leaves the batch."""
        self._texts.pop(request_id, None)
        self._jobs.pop(request_id, None)

    def close(self) -> None:
        """End the threads once they are done."""
        self._threads.shutdown(wait=False, cancel_futures=True)

    def _wait_for(
        self, reqs: Sequence[ScheduledRequest], jobs: dict[int, Future[_Text | None]]
    ) -> list[int]:
        """Wait for threads that follow drafts; return the requests whose thread is late."""
        wait(jobs.values(), PATIENCE_S)
        late = []
        for number, job in jobs.items():
            request_id = reqs[number].request_id
            if not job.done():
                late.append(number)
                del self._texts[request_id]
                self._jobs[request_id] = job
            elif job.result() is None:
                self.forget(request_id)
        return late

    def _forced_of(self, req: ScheduledRequest) -> ForcedText | None:
        """Return what finds grammar drafts behind those of a model, if any are wanted."""
        is_wanted = self.most_drafts and req.model_steps and req.shape.is_chain
        return self._forced if is_wanted else None

    def _bans(self, req: ScheduledRequest) -> Bans:
        held_ids = () if req.edited is None else req.edited.held_ids
        return Bans(self.compiler, req.params, held_ids)

    def _nodes_without_words(
        self, req: ScheduledRequest, drafts: Sequence[int], parents: Sequence[int]
    ) -> list[Node]:
        """Return the nodes of a request without a grammar; parents: -1 for the root."""
        if not req.params.bad_words:
            return [Node(is_legal=True)] * (len(drafts) + 1)

        def after(path: Sequence[int]) -> Node:
            if not completions(req.params, req.generated_ids, path):
                return _LAST
            bans = self._bans(req)
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
        """Return the text of a request, which is ready if it was prepared."""
        text = self._texts.get(req.request_id)
        if text is None or not text.goes_on_to(grammar, req.generated_ids):
            text = _Text(grammar, self.compiler.matcher(grammar), self._bans(req))
        text.read(req.generated_ids)
        if text.matcher.problem:  # possibly a limit that all texts of this grammar share
            matcher = self.compiler.matcher(grammar, anew=True)
            text = _Text(grammar, matcher, text.bans)
            text.read(req.generated_ids)
        self._texts[req.request_id] = text
        return text


class Followed(NamedTuple):
    """The drafts of a request that a thread follows: their tokens and parents, -1 for the root.

    nodes: that of the root, to which theirs are added. replaced: becomes the grammar drafts that
    replace those of a chain behind the first few, and the number of these, if there are any.
    """

    req: ScheduledRequest
    token_ids: list[int]
    parents: list[int]
    nodes: list[Node]
    replaced: list[tuple[int, tuple[int, ...]]]


@dataclass
class _Text:
    """A text, its state in its grammar, and the mask of the next draw (see `Matcher`).

    mask_s: the most time that one of its masks took since the last token. num_slow: see
    `SLOW_MASK_S`.
    """

    grammar: Grammar
    matcher: Matcher
    bans: Bans
    token_ids: tuple[int, ...] = ()
    mask: Mask | None = None
    mask_s: float = 0.0
    num_slow: int = 0
    drafts: tuple[int, ...] = ()
    """Of the text that the grammar forces; see `ForcedText`."""
    _has_mask: bool = False

    def goes_on_to(self, grammar: Grammar, token_ids: tuple[int, ...]) -> bool:
        """Return whether this text is a prefix of `token_ids`, in the same grammar."""
        return self.grammar == grammar and token_ids[: len(self.token_ids)] == self.token_ids

    def read(self, token_ids: tuple[int, ...]) -> None:
        """Advance to the end of `token_ids`, of which this text is a prefix."""
        if self._has_mask and token_ids == self.token_ids:
            return
        added = token_ids[len(self.token_ids) :]
        for first in range(0, len(added), _TOKENS_AT_A_TIME):
            if first:
                time.sleep(1e-6)  # other threads wait for Python's lock
            self.matcher.advance(added[first : first + _TOKENS_AT_A_TIME])
        self.token_ids, self.mask_s, self.drafts = token_ids, 0.0, ()
        self.mask, self._has_mask = self.timed_mask(), True

    def find_drafts(self, forced: ForcedText, most: int) -> None:
        """Make grammar drafts after a new token."""
        if self.mask is not None:
            self.drafts = self.drafts_after(forced, self.mask, (), most)

    def drafts_after(
        self, forced: ForcedText, mask: Mask, path: Sequence[int], most: int
    ) -> tuple[int, ...]:
        """Return grammar drafts at the matcher's state, which is behind some drafts of the text."""
        if self.num_slow or most < 1:
            return ()
        return forced.drafts(self.matcher, mask, (*self.token_ids, *path), most)

    def timed_mask(self) -> Mask | None:
        """Return the mask at the matcher's state; note the time that it takes."""
        start = time.thread_time()
        mask = self.matcher.mask()
        took = time.thread_time() - start
        self.mask_s = max(self.mask_s, took)
        self.num_slow += took > SLOW_MASK_S
        return mask

    def left(self, mask: Mask | None, path: Sequence[int]) -> Mask:
        """Return what bans leave of the mask after the text and some drafts."""
        # A text that cannot continue may end.
        return self.bans.off(self.bans.ends if mask is None else mask, self.token_ids, path)

    def follow(self, wanted: Followed, forced: ForcedText | None) -> _Text | None:
        """Append the nodes of drafts to those of the root. Return the text, unless it is spoilt."""
        req, drafts, parents, nodes, replaced = wanted
        root = nodes[0].mask
        assert root is not None, "a grammar masks every draw"
        found: list[Node] = []

        def mask_at(path: list[int]) -> Mask:
            nodes.extend(found[len(nodes) - 1 :])
            mask, num = self.timed_mask(), len(path)
            if forced and not replaced and mask is not None and num >= req.num_grammar_drafts:
                more = self.drafts_after(forced, mask, path, req.num_draft_tokens - num)
                if more:
                    replaced.append((num, more))
                    drafts[num:] = more
                    parents[num:] = range(num - 1, num + len(more) - 1)
            return self.left(mask, path)

        follow(self.matcher, root, drafts, parents, self.bans.ends, mask_at, found)
        nodes.extend(found[len(nodes) - 1 :])
        if self.matcher.problem:
            logger.warning("request %s: its grammar: %s", req.request_id, self.matcher.problem)
            return None
        return self
