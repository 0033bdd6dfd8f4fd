"""Log-probabilities that are a function of the text before a token, as a model's are."""

import random

from serve_spec.core.request import TokenLogprob


def entry_of(before, token, num_top):
    """What is reported of `token` after `before`; its rivals are bytes."""
    law = random.Random(f"{list(before)} {token}")
    top = sorted(((byte, -5 * law.random()) for byte in law.sample(range(256), num_top)), key=_last)
    return TokenLogprob(token, -5 * law.random(), num_top + 1, tuple(top))


def entries_of(before, tokens, num_top):
    """Of tokens that follow each other; None where nobody asked."""
    if num_top is None:
        return None
    known = [*before, *tokens]
    return tuple(entry_of(known[:-i], known[-i], num_top) for i in range(len(tokens), 0, -1))


def prompt_entries(prompt, num_top):
    """Of a prompt, whose first token has none; None where nobody asked."""
    rest = entries_of(prompt[:1], prompt[1:], num_top)
    return None if rest is None else (None, *rest)


def _last(pair):
    return -pair[1]
