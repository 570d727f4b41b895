"""Reads the vocabulary of a GGUF file and its tokenizer, with what llama.cpp's loader adds to the file.

That loader knows special tokens by their texts, and flags by the name of the rules that cut text. This module
does without torch, as both processes import it.
"""

import json
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from truedraft.engine.formats.gguf_file import GgufError, GgufFile
from truedraft.engine.formats.gguf_splits import BEGINS, WHOLE_WORDS, pre_tokenizer
from truedraft.engine.formats.gguf_word_pieces import ENCODER_TYPES, KIND, word_pieces

KEY = "tokenizer.ggml"
# Values must be of these types; lists must hold such values.
VALUES: dict[str, type] = {f"{KEY}.model": str, f"{KEY}.pre": str, "tokenizer.chat_template": str}
VALUES |= {f"{KEY}.add_{name}": bool for name in ("bos_token", "eos_token", "sep_token", "space_prefix")}
NOT_SERVED = (f"{KEY}.add_sep_token", f"{KEY}.suppress_tokens")
LISTS: dict[str, tuple[type, ...]] = {
    f"{KEY}.tokens": (str,),
    f"{KEY}.token_type": (int,),
    f"{KEY}.scores": (int, float),
    f"{KEY}.merges": (str,),
}
# Tokens have types, which are numbers in the file.
NORMAL, CONTROL, USER_DEFINED = 1, 3, 4

# Tokens with these texts end a generation and are control tokens, whatever type the file gives them.
END_TEXTS = frozenset(
    {
        *("<|eot_id|>", "<|im_end|>", "<|end|>", "<|return|>", "<|call|>", "<|calls|>", "<|flush|>"),
        *("<end_of_turn>", "<|endoftext|>", "</s>", "<|eom_id|>", "<EOT>", "_<EOT>", "[EOT]", "[EOS]"),
        *("<|end_of_text|>", "<end_of_utterance>", "<eos>", "<turn|>", "<|tool_response>", "[e~["),
        "<｜end▁of▁sentence｜>",
    }
)
# If a vocabulary has all tokens of a set, the token named with the set does not end a generation and is of
# the type that follows.
NO_END: tuple[tuple[frozenset[str], str, int], ...] = (
    (frozenset({"<|return|>", "<|call|>"}), "<|end|>", USER_DEFINED),
    (frozenset({"<|return|>", "<|calls|>"}), "<|end|>", USER_DEFINED),
    (frozenset({"<|call|>", "<|flush|>"}), "<|end|>", USER_DEFINED),
    (frozenset({"<|calls|>", "<|flush|>"}), "<|end|>", USER_DEFINED),
    (frozenset({"<|tool_response>"}), "</s>", NORMAL),
)
SHOWN_TEXTS = frozenset({"<|channel|>", "<|message|>", "<|start|>", "<|constrain|>"})
# Tokens that fill in the middle are known by text where the file names none; they are control tokens.
FILL_TEXTS = {
    "fim_pre": ("<|fim_prefix|>", "<fim-prefix>", "<fim_prefix>", "<｜fim▁begin｜>", "<PRE>", "▁<PRE>")
    + ("<|code_prefix|>", "<|prefix|>"),
    "fim_suf": ("<|fim_suffix|>", "<fim-suffix>", "<fim_suffix>", "<｜fim▁hole｜>", "<SUF>", "▁<SUF>")
    + ("<|code_suffix|>", "<|suffix|>"),
    "fim_mid": ("<|fim_middle|>", "<fim-middle>", "<fim_middle>", "<｜fim▁end｜>", "<MID>", "▁<MID>")
    + ("<|code_middle|>", "<|middle|>"),
    "fim_pad": ("<|fim_pad|>", "<fim-pad>", "<fim_pad>", "<PAD>", "[PAD]"),
    "fim_rep": ("<|fim_repo|>", "<|repo_name|>", "<fim-repo>", "<REPO>", "<reponame>"),
    "fim_sep": ("<|file_sep|>",),
}
OLD_NAMES = {"fim_pre": "prefix", "fim_suf": "suffix", "fim_mid": "middle"}
# These named tokens end a generation.
ENDS = ("eos", "eot", "eom", "fim_pad", "fim_rep", "fim_sep")
# Keys are spelt as in the files.
OTHER_NAMES = ("bos", "unknown", "padding", "seperator", "mask", "cls")
# These are the defaults of files that name no such tokens. In a byte-level vocabulary the default is
# Falcon's, and only ends texts.
DEFAULT_IDS = {"llama": {"bos": 1, "eos": 2, "unknown": 0}, "gpt2": {"eos": 11}, "gemma4": {}}
DEFAULT_IDS[KIND] = {"bos": 101, "unknown": 100, "seperator": 102, "padding": 0, "mask": 103}
# Texts begin with the first token in vocabularies of these kinds.
BEGINNING_KINDS = ("llama", "gemma4")

# Files of these architectures have special tokens that swallow the blanks after them, except the tokens in
# the second tuple.
SWALLOWING, NOT_SWALLOWING = ("phi-3", "phi3"), ("<unk>", "<s>", "<|endoftext|>")


@dataclass(frozen=True)
class Vocabulary:
    """Holds what llama.cpp makes of the file: the ``types`` of all tokens, the ``ids`` of named ones, and the
    ``end_ids`` of those that end a generation."""

    kind: str
    rules: str | None
    tokens: list[str]
    types: list[int]
    ids: dict[str, int]
    end_ids: frozenset[int]
    add_bos: bool
    add_eos: bool


def read_vocabulary(file: GgufFile) -> Vocabulary | None:
    """Reads the vocabulary. Returns None if the file has none; raises ``GgufError`` if it is damaged or not
    supported."""
    metadata, path = file.metadata, file.path
    _check_types(file)
    tokens: list[str] | None = metadata.get(f"{KEY}.tokens")
    if not tokens:
        return None
    kind, rules = metadata.get(f"{KEY}.model"), metadata.get(f"{KEY}.pre")
    known = [each for each in DEFAULT_IDS if (each == KIND) == (file.architecture in ENCODER_TYPES)]
    if kind not in known:
        of = f"of {file.architecture}, {', '.join(known)} are supported"
        raise GgufError(f"{path} has a tokenizer of the kind {kind}; {of}")
    tokens = [token or f"[EMPTY_{index}]" for index, token in enumerate(tokens)]
    by_text = {token: index for index, token in enumerate(tokens)}
    if len(by_text) < len(tokens):
        twice = next(token for index, token in enumerate(tokens) if by_text[token] != index)
        raise GgufError(f"{path} is damaged: its vocabulary has the token {twice} twice")
    types = list(metadata.get(f"{KEY}.token_type", [NORMAL] * len(tokens)))
    if len(types) < len(tokens):
        raise GgufError(f"{path} is damaged: {len(types)} token types are too few for {len(tokens)} tokens")
    ids = _named_ids(file, kind, by_text)
    ends = _correct_types(types, tokens, by_text, ids)
    add_bos = bool(metadata.get(f"{KEY}.add_bos_token", kind in BEGINNING_KINDS or rules in BEGINS))
    add_eos = bool(metadata.get(f"{KEY}.add_eos_token", False))
    for name, is_added in (("bos", add_bos), ("eos", add_eos)):
        if is_added and name not in ids:
            raise GgufError(
                f"{path} adds a token to texts that it does not name: it lacks {KEY}.{name}_token_id"
            )
    return Vocabulary(kind, rules, tokens, types, ids, ends, add_bos, add_eos)


def _correct_types(
    types: list[int], tokens: list[str], by_text: dict[str, int], ids: dict[str, int]
) -> frozenset[int]:
    """Sets the ``types`` of tokens that llama.cpp knows by their texts; returns those that end texts."""
    ends = {by_text[text] for text in END_TEXTS & by_text.keys()}
    for index in ends:
        types[index] = CONTROL
    ends |= {ids[name] for name in ENDS if name in ids}
    for name, texts in FILL_TEXTS.items():
        if name in ids and tokens[ids[name]] in texts:
            types[ids[name]] = CONTROL
    for text in SHOWN_TEXTS & by_text.keys():
        types[by_text[text]] = USER_DEFINED
    end_texts = {tokens[index] for index in ends}
    for company, text, kind_then in NO_END:
        if company | {text} <= end_texts:
            ends.discard(by_text[text])
            types[by_text[text]] = kind_then
    return frozenset(ends)


def _check_types(file: GgufFile) -> None:
    for key, value in file.metadata.items():
        is_right = type(value) is VALUES.get(key, type(value))
        if key in LISTS:
            is_right = isinstance(value, list) and all(type(each) in LISTS[key] for each in value)
        if not is_right:
            raise GgufError(f"{file.path} is damaged: its {key} is of another type than it must be")
        if key in NOT_SERVED and value and file.architecture not in ENCODER_TYPES:
            raise GgufError(f"{file.path} asks for {key} = {value}, which is not served")


def _named_ids(file: GgufFile, kind: str, by_text: dict[str, int]) -> dict[str, int]:
    ids = {name: index for name, index in DEFAULT_IDS[kind].items() if index < len(by_text)}
    for name in (*ENDS, *OTHER_NAMES, *OLD_NAMES):
        for key in (name, OLD_NAMES.get(name, name)):
            index = file.metadata.get(f"{KEY}.{key}_token_id")
            if index is not None:
                if not isinstance(index, int) or not 0 <= index < len(by_text):
                    raise GgufError(f"{file.path} is damaged: its {key}_token_id {index} is no token")
                ids[name] = index
    return known_fill_ids(by_text.get) | ids


def known_fill_ids(id_of: Callable[[str], int | None]) -> dict[str, int]:
    """Returns the tokens that fill in the middle, by name, as their texts tell them."""
    found = {name: [id_of(text) for text in texts] for name, texts in FILL_TEXTS.items()}
    ids = {name: next((index for index in each if index is not None), None) for name, each in found.items()}
    return {name: index for name, index in ids.items() if index is not None}


def gguf_tokenizer(file: GgufFile) -> Any:
    """Returns transformers' tokenizer, with ``fill_ids`` of the tokens that fill in the middle; raises
    ``GgufError``."""
    from transformers import PreTrainedTokenizerFast

    vocabulary = read_vocabulary(file)
    if vocabulary is None:
        raise GgufError(f"{file.path} has no tokenizer ({KEY}.tokens)")
    try:
        fast = BUILDERS[vocabulary.kind](file, vocabulary)
        _add_tokens(fast, vocabulary)
        if any(name in str(file.metadata.get("general.name", "")).lower() for name in SWALLOWING):
            fast = _swallowing(fast)
    except GgufError:
        raise
    except Exception as error:  # The Rust core raises no other exception.
        reason = " ".join(str(error).split())[:200]
        raise GgufError(f"the tokenizer in {file.path} is damaged: {reason}") from error
    if missing := [token for token, index in fast.get_vocab().items() if index >= len(vocabulary.tokens)]:
        raise GgufError(f"{file.path} lacks the token {min(missing)}, which its tokenizer needs")
    named = {"bos": "bos", "eos": "eos", "unknown": "unk", "padding": "pad"}
    # What stands around a text is in the tokenizer already where pairs of texts have such tokens.
    adds = {"add_bos_token": vocabulary.add_bos, "add_eos_token": vocabulary.add_eos}
    # The default end of a byte-level vocabulary is an ordinary token in a text.
    special = {
        f"{ours}_token": vocabulary.tokens[vocabulary.ids[name]]
        for name, ours in named.items()
        if name in vocabulary.ids and (vocabulary.kind != "gpt2" or f"{KEY}.{name}_token_id" in file.metadata)
    }
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=fast,
        chat_template=file.metadata.get("tokenizer.chat_template"),
        **({} if vocabulary.kind == KIND else adds),
        **special,
    )
    tokenizer.fill_ids = {name: vocabulary.ids[name] for name in FILL_TEXTS if name in vocabulary.ids}
    return tokenizer


def _sentencepiece(file: GgufFile, vocabulary: Vocabulary) -> Any:
    from tokenizers import decoders, normalizers
    from transformers.integrations.gguf import gguf_tokenizer_mapping as mapping

    metadata = file.metadata
    named = mapping.GGUF_TOKENIZER_MAPPING["tokenizer"]
    fields = {
        ours: metadata[f"tokenizer.{key}"] for key, ours in named.items() if f"tokenizer.{key}" in metadata
    }
    fast = mapping.sentencepiece_tokenizer(fields | {"tokens": vocabulary.tokens}).backend_tokenizer
    begins = metadata.get(f"{KEY}.add_space_prefix", True)
    # A blank goes before a text, and before any text that follows a control token.
    prefix = [normalizers.Prepend("▁")] if begins else []
    fast.normalizer = normalizers.Sequence([*prefix, normalizers.Replace(" ", "▁")])
    fast.pre_tokenizer = None
    parts = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    fast.decoder = decoders.Sequence([*parts, *([decoders.Strip(" ", 1, 0)] if begins else [])])
    return fast


def _marked_blanks(file: GgufFile, vocabulary: Vocabulary) -> Any:
    """Builds Gemma 4's tokenizer: merges of the file over whole texts, and bytes for characters that no token
    has."""
    from tokenizers import Tokenizer, decoders, normalizers
    from tokenizers.models import BPE

    vocab = {token: index for index, token in enumerate(vocabulary.tokens)}
    unknown = vocabulary.tokens[vocabulary.ids["unknown"]] if "unknown" in vocabulary.ids else None
    fast = Tokenizer(BPE(vocab, _merges(file), fuse_unk=True, byte_fallback=True, unk_token=unknown))
    fast.normalizer = normalizers.Replace(" ", "▁")
    fast.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
    return fast


def _merges(file: GgufFile) -> list[tuple[str, str]]:
    cuts = ((merge, merge.find(" ", 1)) for merge in file.metadata.get(f"{KEY}.merges", []))
    return [(merge[:cut], merge[cut + 1 :]) for merge, cut in cuts]


def _byte_level(file: GgufFile, vocabulary: Vocabulary) -> Any:
    from tokenizers import Tokenizer, decoders
    from tokenizers.models import BPE

    letters = _byte_letters()
    alphabet = set(letters)

    def spelt(token: str, kind: int) -> str:
        """Returns a token's text: tokens that stand for themselves are spelt as they are, others in letters
        for bytes."""
        if kind in (CONTROL, USER_DEFINED) or alphabet.issuperset(token):
            return token
        return "".join(letters[byte] for byte in token.encode())

    numbered = zip(vocabulary.tokens, vocabulary.types, strict=False)
    vocab = {spelt(token, kind): index for index, (token, kind) in enumerate(numbered)}
    fast = Tokenizer(BPE(vocab, _merges(file), fuse_unk=False, ignore_merges=vocabulary.rules in WHOLE_WORDS))
    try:
        fast.pre_tokenizer = pre_tokenizer(vocabulary.rules)
    except KeyError as error:
        raise GgufError(
            f"{file.path} cuts text by the rules {vocabulary.rules}, which are not supported"
        ) from error
    fast.decoder = decoders.ByteLevel()
    return fast


def _byte_letters() -> list[str]:
    """Returns the letter for each byte in a byte-level vocabulary: the byte itself where it can be
    printed."""
    seen = {*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), 256)}
    others = iter(range(256, 512))
    return [chr(byte if byte in seen else next(others)) for byte in range(256)]


def _add_tokens(fast: Any, vocabulary: Vocabulary) -> None:
    """Adds control tokens and user-defined tokens, which are found whole in a text."""
    from tokenizers import AddedToken

    numbered = list(zip(vocabulary.tokens, vocabulary.types, strict=False))
    for kind, add in ((CONTROL, fast.add_special_tokens), (USER_DEFINED, fast.add_tokens)):
        # Gemma's runs of blanks are in its vocabulary under another spelling, which merges find.
        found = [token for token, its in numbered if its == kind and fast.token_to_id(token) is not None]
        add([AddedToken(token, normalized=False, special=kind == CONTROL) for token in found])


def _swallowing(fast: Any) -> Any:
    from tokenizers import Tokenizer

    described = json.loads(fast.to_str())
    for token in described["added_tokens"]:
        token["rstrip"] = token["content"] not in NOT_SWALLOWING
    return Tokenizer.from_str(json.dumps(described))


def _word_pieces(file: GgufFile, vocabulary: Vocabulary) -> Any:
    numbered = enumerate(vocabulary.types[: len(vocabulary.tokens)])
    shown_whole = {index for index, kind in numbered if kind in (CONTROL, USER_DEFINED)}
    return word_pieces(file, vocabulary.tokens, shown_whole, vocabulary.ids)


BUILDERS = {"llama": _sentencepiece, "gpt2": _byte_level, "gemma4": _marked_blanks, KIND: _word_pieces}
