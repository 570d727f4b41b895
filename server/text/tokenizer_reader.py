"""A process that reads a model's tokenizer and ends. Started by ``server.text.tokenizer.read_apart``.

What transformers imports for that, and the vocabulary that some of its classes keep in Python, take several
times the memory of what the front end needs of a tokenizer.
"""

import json
import os
import sys
from typing import Any

from truedraft.engine.formats.gguf_tokenizer import known_fill_ids
from truedraft.engine.formats.pretrained_tokenizer import load_pretrained_tokenizer
from truedraft.engine.machine.lifeline import end_with_parent


def main() -> int:
    end_with_parent()
    _do_without_torch()
    answer = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)  # whatever a library prints
    with answer:
        try:
            json.dump(told(sys.argv[1]), answer)
        except (OSError, ValueError) as error:
            json.dump({"error": str(error)}, answer)
    return 0


def _do_without_torch() -> None:
    """transformers would import it wherever it is installed, which takes longer than all that is needed here
    of a tokenizer; it is made to do without, and otherwise says so."""
    sys.modules["torch"] = None  # type: ignore[assignment]
    os.environ["TRANSFORMERS_NO_ADVISORY_WARNINGS"] = "1"


def told(model: str) -> dict[str, Any]:
    """Returns what the front end needs of a model's tokenizer; raises ``ValueError`` if it has none."""
    tokenizer = load_pretrained_tokenizer(model)
    fast = getattr(tokenizer, "backend_tokenizer", None)
    if fast is None:
        raise ValueError(f"The tokenizer of {model} has no fast (tokenizer.json) form.")
    return {
        "fast": fast.to_str(),
        "chat_template": tokenizer.chat_template,
        "special_tokens_map": {name: _plain(token) for name, token in tokenizer.special_tokens_map.items()},
        "eos_token_id": tokenizer.eos_token_id,
        "fill_ids": getattr(tokenizer, "fill_ids", None) or known_fill_ids(fast.token_to_id),
    }


def _plain(token: Any) -> Any:
    return [_plain(each) for each in token] if isinstance(token, list | tuple) else str(token)


if __name__ == "__main__":
    sys.exit(main())
