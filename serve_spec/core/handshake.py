"""Proof that both ends of a connection know a secret, which never crosses the connection.

Each end sends a random challenge and answers the other end's (HMAC-SHA256, RFC 2104).
"""

import hmac
import os

NUM_BYTES = 32
"""Length of a challenge and of a proof."""


def challenge() -> bytes:
    """Return a new challenge of `NUM_BYTES` bytes."""
    return os.urandom(NUM_BYTES)


def proof(secret: bytes, name: bytes, challenge: bytes) -> bytes:
    """Return the answer of the end `name` to the other end's challenge.

    name: differs between the two ends, so that a proof cannot be sent back as one's own.
    """
    return hmac.digest(secret, name + challenge, "sha256")


def is_proof(answer: bytes, secret: bytes, name: bytes, challenge: bytes) -> bool:
    """Return whether `answer` is `proof(secret, name, challenge)`, in constant time."""
    return hmac.compare_digest(answer, proof(secret, name, challenge))
