"""Numbers the tokens of pictures by what the pictures show, where computed beginnings are told apart.

A picture's tokens all have the id of a placeholder. Their numbers are larger than any token's id.
"""

FIRST_IDENTITY = 1 << 32
DIGEST_BYTES, IDENTITY_BYTES = 16, 20


def identity(digest: bytes) -> int:
    """Returns the number of a picture's tokens. Written in ``IDENTITY_BYTES``, the lowest byte first, it
    begins with four bytes that no id of a token has, and goes on with the ``digest``."""
    return int.from_bytes(digest, "little") << 32 | (FIRST_IDENTITY - 1)
