"""Names the tokens that a head drafts, so that a trace can say which distribution a draft was drawn from."""

from hashlib import sha256

import numpy as np
import numpy.typing as npt

from truedraft.engine.messages import DraftVocabulary

Ids = npt.NDArray[np.int64]

# Hexadecimal digits of a digest.
DIGITS = 16


def named(token_ids: Ids) -> DraftVocabulary:
    """Describes the vocabulary of ``token_ids``, whose order does not matter."""
    has = np.zeros(int(token_ids.max(initial=-1)) + 1, np.bool_)
    has[token_ids] = True
    bitmap = np.packbits(has, bitorder="little").tobytes()
    return DraftVocabulary(digest_of(bitmap), bitmap)


def digest_of(bitmap: bytes) -> str:
    """Returns the digest by which rounds name these tokens."""
    return sha256(bitmap).hexdigest()[:DIGITS]


def token_ids_of(bitmap: bytes) -> Ids:
    """Returns the ids in order."""
    return np.unpackbits(np.frombuffer(bitmap, np.uint8), bitorder="little").nonzero()[0]
