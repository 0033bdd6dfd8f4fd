"""Grammars compiled to matchers. Only this file uses the library, llguidance.

Without it, or with a tokenizer that it does not support, an engine runs but refuses grammars.
"""

from __future__ import annotations

import json
import re
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from fractions import Fraction
from functools import cached_property
from math import gcd, lcm
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from serve_spec.core.errors import InvalidRequest
from serve_spec.core.grammar import CallsForm, Grammar, GrammarKind
from serve_spec.log import get_logger
from serve_spec.structured.schema import KEYWORDS, rewritten

MAX_DEPTH = 100
"""Most nested objects and arrays; the compiler's own limit is a little higher."""

MAX_REMAINDERS = 10_000
"""Most states of the automaton for `multipleOf`; they take a fifth of a second to compile."""


def checked_schema(grammar: Grammar) -> dict[str, Any]:
    """Return the schema. Raise if it is no JSON object, too deep, or its numbers cost too much.

    Raises:
        InvalidRequest: with the reason, naming the grammar's source.
    """
    try:
        schema = json.loads(grammar.text)
        depth, steps = _survey(schema)
        num_remainders = _remainders(steps)
    except RecursionError:
        raise grammar.refusal(_TOO_DEEP) from None
    except ValueError as error:
        raise grammar.refusal(f"not JSON: {error}") from None
    if not isinstance(schema, dict):
        raise grammar.refusal("a JSON Schema is an object here")
    if depth > MAX_DEPTH:
        raise grammar.refusal(_TOO_DEEP)
    if num_remainders > MAX_REMAINDERS:
        fix = f"the least common multiple of all multipleOf may be {MAX_REMAINDERS} at most"
        raise grammar.refusal(fix)
    return schema


_TOO_DEEP = f"nest at most {MAX_DEPTH} objects and arrays"

_VALUES_AT_A_TIME = 128
"""Looking at so many values takes less than 0.1 ms."""


def _survey(root: object) -> tuple[int, set[float]]:
    """Return the depth of objects and arrays in `root`, and all values of `multipleOf`."""
    deepest, steps, num_values = 0, set(), 0
    left = [(0, root)]
    while left:
        depth, value = left.pop()
        deepest = max(deepest, depth)
        num_values += 1
        if num_values % _VALUES_AT_A_TIME == 0:
            time.sleep(1e-6)  # other threads wait for Python's lock, the engine's among them
        if isinstance(value, dict):
            step = value.get("multipleOf")
            if isinstance(step, int | float) and not isinstance(step, bool) and step > 0:
                steps.add(step)
            left += ((depth + 1, item) for item in value.values())
        elif isinstance(value, list):
            left += ((depth + 1, item) for item in value)
    return deepest, steps


def _remainders(steps: set[float]) -> int:
    """Return the least common multiple of `steps`, in units of their last decimal place."""
    # As they are written: 0.1 is a tenth.
    exact = [Fraction(str(step)) for step in steps]
    if not exact:
        return 0
    multiple = lcm(*(step.numerator for step in exact))
    return multiple * lcm(*(s.denominator for s in exact)) // gcd(*(s.denominator for s in exact))


logger = get_logger(__name__)

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer

Mask = NDArray[np.uint32]
"""One bit per token id, the lowest first: whether the token may come next; [ceil(V / 32)]."""

_KEPT_GRAMMARS = 64
"""Compiled grammars that are cached, because many requests share one."""

_MAX_ITEMS_IN_ROW = 20_000
"""Most parser items at one position; an object of a few thousand optional properties needs them."""

_MAX_LEXER_STATES = 50_000
"""Most lexer states for all texts of a grammar, up to 2 kB each."""

_STACK_BYTES = 512 * 2**20
"""The compiler recurses along references. The longest grammar touches about a tenth of this; the
rest is address space."""

_WHITESPACE = r" {0,2}(\n[ \t]{0,32})?"
"""White space between JSON's tokens: up to two spaces, or a new line with indentation. With any
amount allowed, models sometimes write white space only."""

_WITH_WHITESPACE = {"x-guidance": {"whitespace_pattern": _WHITESPACE}}

_OPTIONS = '%llguidance {"no_forcing": true}'
"""A mask holds every token that a valid text may have next, in any tokenization. Otherwise the
library searches one tokenization of forced text to its end, which some grammars do not have."""

_SPECIAL = b"\xff"
"""In the library's bytes, a special token follows it."""

_LISTING = re.compile(r"^\s*\d+ \| .*", re.DOTALL | re.MULTILINE)
"""The library's own copy of a grammar, behind the reason."""

_NESTED = re.compile(r"%\s*(json|regex|lark|llguidance|import)\b")
_MAX_PROBLEM_CHARS = 300
T = TypeVar("T")


class Matcher:
    """The state of a text in its grammar."""

    def __init__(self, matcher: LLMatcher, num_words: int) -> None:
        self._matcher = matcher
        self._num_words = num_words

    def copy(self) -> Matcher:
        """Return an independent copy."""
        return Matcher(self._matcher.deep_copy(), self._num_words)

    def advance(self, token_ids: Sequence[int]) -> bool:
        """Advance by tokens. Return whether they are valid; if not, the matcher is unusable."""
        return not token_ids or bool(self._matcher.consume_tokens(list(token_ids)))

    def go_back(self, num_tokens: int) -> None:
        """Undo the last tokens."""
        if num_tokens:
            self._matcher.rollback(num_tokens)

    def mask(self) -> Mask | None:
        """Return the tokens that may come next, end tokens included if the text may end here.

        None: no token, for example because the grammar exceeds the library's limits.
        """
        if self._matcher.is_error():
            return None
        words = np.frombuffer(self._matcher.compute_bitmask(), dtype=np.uint32)[: self._num_words]
        return None if self._matcher.is_error() or not words.any() else words

    def forced_bytes(self) -> bytes:
        """Return the bytes that every text continues with, up to a special token."""
        if self._matcher.is_error():
            return b""
        return bytes(self._matcher.compute_ff_bytes()).split(_SPECIAL)[0]

    def allows_all(self, token_ids: Sequence[int]) -> bool:
        """Return whether these tokens may come next, without advancing."""
        return int(self._matcher.validate_tokens(list(token_ids))) == len(token_ids)

    @property
    def exceeds_limits(self) -> bool:
        """Return whether the grammar has exceeded the library's limits in this text."""
        # The library has no code for it; this is its only other problem.
        return bool(self.problem) and "satisfy the grammar" not in self.problem

    @property
    def problem(self) -> str:
        """Return what went wrong, in one line; empty if nothing did."""
        return _one_line(self._matcher.get_error())

    @property
    def reason(self) -> str:
        """Return `problem` without the grammar."""
        return _one_line(_LISTING.sub("", self._matcher.get_error() or ""))


class GrammarCompiler:
    """Compiles grammars for one vocabulary. Safe to call from any thread.

    tokenizer: returns the tokenizer.json of the model.
    vocab_size: width of a row of logits; ids without a token are never allowed.
    num_ids: ids from here on are padding; None: there is none.
    """

    def __init__(
        self,
        tokenizer: Callable[[], str],
        vocab_size: int,
        eos_token_ids: Sequence[int],
        num_ids: int | None = None,
    ) -> None:
        self.vocab_size = vocab_size
        self.num_ids = vocab_size if num_ids is None else num_ids
        self.num_words = -(-vocab_size // 32)
        self.eos_token_ids = tuple(sorted(eos_token_ids))
        self._tokenizer = tokenizer
        self._lock = threading.Lock()
        self._compiled: dict[Grammar, Matcher] = {}
        self._translated: dict[Grammar, Grammar] = {}

    def prepare(self) -> None:
        """Read the vocabulary before the first request; it takes seconds if it is large."""
        try:
            _ = self.first_bytes
        except (ImportError, ValueError) as error:
            logger.warning("requests with a grammar will be refused: %s", _one_line(error))

    def matcher(self, grammar: Grammar, *, anew: bool = False) -> Matcher:
        """Return a matcher at the start of a text.

        anew: without the states that other texts of the grammar have added. They save time, but
        count toward the limits of all texts.

        Raises:
            InvalidRequest: no text matches the grammar, or it cannot be compiled.
        """
        compiled = None if anew else self._compiled.get(grammar)
        if compiled is None:
            compiled = self._compile(grammar)
            self._keep(self._compiled, grammar, compiled)
        return compiled.copy()

    def translate(self, grammar: Grammar) -> Grammar:
        """Return a grammar that was compiled, for another compiler of the same vocabulary.

        That compiler needs the library alone, which works without Python's lock.
        """
        translated = self._translated.get(grammar)
        if translated is None:
            stated = self._stated(grammar)
            translated = Grammar(GrammarKind.LLGUIDANCE, stated, grammar.source)
            self._keep(self._translated, grammar, translated)
        return translated

    @cached_property
    def ends(self) -> Mask:
        """Return the end-of-text tokens."""
        return self.mask_of(self.eos_token_ids)

    @cached_property
    def everything(self) -> Mask:
        """Return the whole vocabulary, without padding."""
        return self.mask_of(range(self.num_ids))

    def mask_of(self, token_ids: Sequence[int]) -> Mask:
        """Return the mask of some tokens; ids beyond the vocabulary are ignored."""
        bits = np.zeros(self.num_words * 32, dtype=bool)
        bits[[token for token in token_ids if 0 <= token < self.vocab_size]] = True
        return np.packbits(bits, bitorder="little").view(np.uint32)

    def tokens_of(self, text: bytes) -> list[int]:
        """Return the usual tokens of a text, which has no special tokens."""
        return list(self._vocabulary.tokenize_bytes(text))

    def settled_tokens_of(self, text: bytes, before: Sequence[int]) -> list[int]:
        """Return the usual tokens of the start of a text that are the same however it goes on."""
        return list(self._vocabulary.tokenize_partial(text, recent_tokens=list(before))[0])

    def bytes_of(self, token_ids: Sequence[int]) -> bytes:
        """Return the bytes of tokens, of special tokens their names."""
        return bytes(self._vocabulary.decode_bytes(list(token_ids)))

    @cached_property
    def first_bytes(self) -> NDArray[np.int16]:
        """Return the first byte of every token, -1 of special ones; [V]."""
        tokens = self._vocabulary
        found = np.full(self.vocab_size, -1, np.int16)
        for token in range(min(self.vocab_size, tokens.vocab_size)):
            if not tokens.is_special_token(token):
                found[token] = (tokens.decode_bytes([token]) or b"\xff")[0]
        return found

    @cached_property
    def _vocabulary(self) -> LLTokenizer:
        from llguidance import LLTokenizer

        return LLTokenizer(
            self._tokenizer(), n_vocab=self.vocab_size, eos_token=list(self.eos_token_ids)
        )

    def _keep(self, known: dict[Grammar, T], grammar: Grammar, value: T) -> None:
        with self._lock:
            known[grammar] = value
            if len(known) > _KEPT_GRAMMARS:
                del known[next(iter(known))]

    def _compile(self, grammar: Grammar) -> Matcher:
        if not self.eos_token_ids:
            raise grammar.refusal("this model has no end-of-text token to end with; leave it out")
        try:
            matcher = on_deep_stack(lambda: self._matcher(grammar))
        except InvalidRequest:
            raise
        except (ImportError, ValueError) as error:
            raise grammar.refusal(_one_line(error)) from None
        if matcher.problem:
            is_written_here = grammar.kind is not GrammarKind.EBNF
            raise grammar.refusal(matcher.reason if is_written_here else matcher.problem)
        mask = matcher.mask()
        if mask is None or not (mask & ~self.ends).any():
            raise grammar.refusal(f"no text matches it, or only an empty one {matcher.problem}")
        return matcher

    def _matcher(self, grammar: Grammar) -> Matcher:
        from llguidance import LLMatcher, LLParserLimits

        stated = self._stated(grammar)
        limits = LLParserLimits(
            max_items_in_row=_MAX_ITEMS_IN_ROW,
            max_lexer_states=_MAX_LEXER_STATES,
            verbose_errors=False,
        )
        matcher = LLMatcher(self._vocabulary, stated, limits=limits, log_level=0)
        return Matcher(matcher, self.num_words)

    def _stated(self, grammar: Grammar) -> str:
        """Return the grammar in the library's notation, Lark's."""
        from llguidance import grammar_from

        match grammar.kind:
            case GrammarKind.JSON_SCHEMA:
                rules = f"start: %json {_with_whitespace(*_supported(grammar))}"
            case GrammarKind.REGEX:
                rules = _expression(grammar.text)
            case GrammarKind.CHOICE:
                # One regular expression is one parser item; alternatives would be one each.
                rules = _expression("|".join(map(re.escape, json.loads(grammar.text))))
            case GrammarKind.CALLS:
                rules = self._calls(CallsForm(**checked_schema(grammar)))
            case GrammarKind.EBNF:
                if found := _NESTED.search(grammar.text):
                    raise grammar.refusal(f"{found[0]} is not available; write out its rules")
                rules = grammar_from("grammar", grammar.text)
            case GrammarKind.LLGUIDANCE:
                return grammar.text
        return f"{_OPTIONS}\n{rules}"

    def _calls(self, form: CallsForm) -> str:
        """Return the rules of calls of functions."""
        marker = (form.opening or form.calls[0][0])[0] if form.is_free else None
        # A text marker ends the text before it; a special token is never part of a text.
        ends_text = marker is not None and self._special_id(marker) is None
        opening = form.opening[ends_text:]
        first_piece = int(ends_text and not form.opening)
        names = [f"call_{index}" for index in range(len(form.calls))]
        rules = [f"call: {' | '.join(names)}"]
        for name, (before, schema, after) in zip(names, form.calls, strict=True):
            text = self._text(before[first_piece:])
            rules.append(f"{name}: {text} of_{name} {self._text(after)}")
            supported = {**_rewritten(schema), **_WITH_WHITESPACE}
            rules.append(f"of_{name}: %json {json.dumps(supported)}")
        thought, more_rules = self._thought(form)
        rules += more_rules
        more = "" if form.is_single else f"({self._text(form.between)} call)*"
        calls = f"{self._text(opening)} call {more} {self._text(form.ending)}"
        if marker is not None:
            head, text = "TEXT", r"TEXT: /(.|\n)*/"
            if ends_text:
                head, text = "head", rf"{text} & ~({_up_to(marker)} /(.|\n)*/)"
                rules.append(f"head[lazy]: {_up_to(marker)}")
            rules.append(text)
            is_once = form.is_single or form.opening
            calls = f"({head} {calls if form.opening else 'call'}){'?' if is_once else '*'} TEXT"
        return "\n".join([f"start: {thought} {calls}", *rules])

    def _thought(self, form: CallsForm) -> tuple[str, list[str]]:
        """Return what stands for the thought before calls, and its rules."""
        if form.thought is None:
            return "", []
        before, (end, *after), is_open = form.thought
        if form.is_free and not is_open and self._special_id(before[0]) is None:
            return "", []  # it begins as any text does
        is_token = self._special_id(end) is not None
        inside = f"/(.|\\n)*/ {self._text([end])}" if is_token else "inside"
        then = self._text(after) or r"/\n{0,2}/"
        rules = [f"thought: {'' if is_open else self._text(before)} {inside} {then}"]
        if not is_token:
            rules.append(f"inside[lazy]: {_up_to(end)}")
        return "thought" if is_open else "thought?", rules

    def _text(self, pieces: Sequence[str]) -> str:
        """Return texts and special tokens in Lark's notation."""
        ids = [self._special_id(piece) for piece in pieces]
        return " ".join(
            json.dumps(piece, ensure_ascii=False) if token is None else f"<[{token}]>"
            for piece, token in zip(pieces, ids, strict=True)
        )

    def _special_id(self, name: str) -> int | None:
        """Return the id of the special token of this name."""
        tokens = self._vocabulary.tokenize_str(name)
        is_special = len(tokens) == 1 and self._vocabulary.is_special_token(tokens[0])
        return int(tokens[0]) if is_special else None


def _up_to(end: str) -> str:
    """Return the regular expression of a text that ends with `end`."""
    escaped = re.escape(end).replace("/", r"\/")
    return rf"/(.|\n)*{escaped}/"


def _supported(grammar: Grammar) -> tuple[Mapping[str, Any], str]:
    """Return the schema and its text with keywords that the library has, where that is possible."""
    given = checked_schema(grammar)
    if not any(f'"{keyword}"' in grammar.text for keyword in KEYWORDS):
        return given, grammar.text
    schema = _rewritten(given)
    return schema, json.dumps(schema)


def _rewritten(schema: Mapping[str, Any]) -> Mapping[str, Any]:
    try:
        return dict(rewritten(schema, schema))
    except (AttributeError, KeyError, TypeError, ValueError):
        return schema  # an invalid one, which the library refuses


def _with_whitespace(schema: Mapping[str, Any], text: str) -> str:
    """Return a schema, given parsed and as text, as JSON with the whitespace that it allows.

    Writing a long one anew would hold Python's lock for 0.3 ms.
    """
    if not schema or _WITH_WHITESPACE.keys() & schema or not text.isascii():
        return json.dumps({**schema, **_WITH_WHITESPACE})
    return f"{text.rstrip().removesuffix('}')}, {json.dumps(_WITH_WHITESPACE)[1:]}"


def _expression(regex: str) -> str:
    """Return a regular expression as the only rule of a grammar."""
    from llguidance import LLMatcher

    (stated,) = json.loads(LLMatcher.grammar_from_regex(regex))["grammars"]
    return str(stated["lark_grammar"])


def _one_line(problem: object) -> str:
    """Return the first part of the library's message, which may be long."""
    return " ".join(str(problem).replace("<non-verbose/>", "").split())[:_MAX_PROBLEM_CHARS]


_one_at_a_time = threading.Lock()


def on_deep_stack(work: Callable[[], T]) -> T:
    """Run `work` in a thread with a stack for deep recursion; return or raise as it does."""
    outcome: Future[T] = Future()

    def run() -> None:
        try:
            outcome.set_result(work())
        except BaseException as error:
            outcome.set_exception(error)

    thread = threading.Thread(target=run, name="grammar", daemon=True)
    with _one_at_a_time:
        # The size holds for the whole process; threads that start meanwhile get it, too.
        usual = threading.stack_size(_STACK_BYTES)
        try:
            thread.start()
        finally:
            threading.stack_size(usual)
    return outcome.result()
