"""Proof that both ends of a connection know a secret, which never crosses the connection.

Each end sends a random challenge and answers the other end's (HMAC-SHA256, RFC 2104). Later
messages carry tags (keyed BLAKE2b, RFC 7693). Nothing is encrypted.
"""

import hashlib
import hmac
import os

NUM_BYTES = 32
"""Length of a challenge and of a proof."""
_TAG_BYTES = 16


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


class MessageTags:
    """Tags of the messages that one end of a connection sends, in their order.

    sender: name of that end. challenges: the sender's and the other end's of this connection.
    """

    def __init__(self, secret: bytes, sender: bytes, challenges: bytes) -> None:
        # No proof that an end gives away begins with these words.
        key = proof(secret, b"messages of " + sender, challenges)
        self._keyed = hashlib.blake2b(key=key, digest_size=_TAG_BYTES)
        self._count = 0

    def next(self, message: bytes) -> bytes:
        """Return the tag of the next message."""
        keyed = self._keyed.copy()
        keyed.update(self._count.to_bytes(8, "little"))
        keyed.update(message)
        self._count += 1
        return keyed.digest()

    def opened(self, tagged: bytes) -> bytes:
        """Return the message behind its tag; raise OSError if it is not the sender's next one."""
        message = tagged[_TAG_BYTES:]
        if not hmac.compare_digest(tagged[:_TAG_BYTES], self.next(message)):
            raise OSError("forged message: its tag is not that of the sender")
        return message
