"""Has the rules by which byte-level files cut a text before they look for tokens; a file only names them.

The expressions are those of the models' own ``tokenizer.json``, or llama.cpp's. This module does without
torch, as both processes import it.
"""

from typing import Any

CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
BLANKS = r"\s*[\r\n]+|\s+(?!\S)|\s+"
WORDS, MARKED_WORDS = r"[^\r\n\p{L}\p{N}]?\p{L}+", r"[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+"
SIGNS = r" ?[^\s\p{L}\p{N}]+[\r\n]*"
GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
LLAMA3 = rf"{CONTRACTIONS}|{WORDS}|\p{{N}}{{1,3}}|{SIGNS}|{BLANKS}"
QWEN2 = rf"{CONTRACTIONS}|{WORDS}|\p{{N}}|{SIGNS}|{BLANKS}"
MINICPM5 = rf"{CONTRACTIONS}|{WORDS}|\p{{N}}+|{SIGNS}|{BLANKS}"
QWEN35 = rf"{CONTRACTIONS}|{MARKED_WORDS}|\p{{N}}| ?[^\s\p{{L}}\p{{M}}\p{{N}}]+[\r\n]*|{BLANKS}"
UFAKZEKA = rf"{WORDS}|\p{{N}}|{SIGNS}|{BLANKS}"
SEED_CODER = rf"{CONTRACTIONS}|{WORDS}|\p{{N}}| ?[^\s\p{{L}}\p{{N}}\r\n]+|{BLANKS}"
# Possessive quantifiers give nothing back: a mark goes to the letters after it, or is a sign.
BAILING = (
    r"'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?+\p{L}+|\p{N}"
    r"| ?[^\s\p{L}\p{N}]++[\r\n]*|\s*[\r\n]|\s+(?!\S)|\s+"
)
EXAONE_MOE = (
    rf"{CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?(?:\p{{L}}\p{{M}}*(?: \p{{L}}\p{{M}}*)*)+|\p{{N}}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n/]?|\s*[\r\n]|\s+(?!\S)|\s+"
)
RUNS_OF_BLANKS = "|".join(
    [*(rf"\s{{{2**power}}}(?!\S)" for power in range(9, 1, -1)), r"\s{1,2}(?!\S)", r"\s{1}"]
)
JAIS2 = rf"{CONTRACTIONS}|{WORDS}|\p{{N}}{{1,3}}|{SIGNS}|\s*[\r\n]+|{RUNS_OF_BLANKS}"


def _cased(end: str, numbers: str, unless: str = "", signs: str = r"[\r\n/]*") -> str:
    """Returns an expression that also cuts before capital letters. ``end`` matches what words take with them;
    ``unless`` matches what their letters must not be."""
    upper, lower = (
        rf"[\p{{Lu}}\p{{Lt}}\p{{Lm}}\p{{Lo}}\p{{M}}{unless}]",
        rf"[\p{{Ll}}\p{{Lm}}\p{{Lo}}\p{{M}}{unless}]",
    )
    words = [
        rf"[^\r\n\p{{L}}\p{{N}}]?{upper}{first}{lower}{then}{end}" for first, then in (("*", "+"), ("+", "*"))
    ]
    return "|".join([*words, numbers, rf" ?[^\s\p{{L}}\p{{N}}]+{signs}", BLANKS])


TEKKEN = _cased("", r"\p{N}")
GPT4O = _cased(f"{CONTRACTIONS}?", r"\p{N}{1,3}")
KIMI = r"\p{Han}+|" + _cased(f"{CONTRACTIONS}?", r"\p{N}{1,3}", r"&&[^\p{Han}]", r"[\r\n]*")
YOUTU = (
    "[가-힣ㄱ-ㆎ]+|[！…“”‘’—：；，、-〿︰-﹏]+|[ㄅ-ㄯ]+|[一-龥぀-ゟ゠-ヿ]+",
    _cased(f"{CONTRACTIONS}?", r"\p{N}"),
)
ASCII_SIGNS = r"""[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~]"""
HAN_AND_KANA = "[一-龥぀-ゟ゠-ヿ]+"
DEEPSEEK_WORDS = rf"{ASCII_SIGNS}[A-Za-z]+|[^\r\n\p{{L}}\p{{P}}\p{{S}}]?[\p{{L}}\p{{M}}]+"
DEEPSEEK3 = (r"\p{N}{1,3}", HAN_AND_KANA, rf"{DEEPSEEK_WORDS}| ?[\p{{P}}\p{{S}}]+[\r\n]*|{BLANKS}")
SPARK = (
    *(r"\p{N}{1,3}", HAN_AND_KANA),
    *(rf"{DEEPSEEK_WORDS}| ?[\p{{P}}\p{{S}}]+|[\r\n]|\s+(?!\S)|\s+", r"\p{N}"),
)
# These scripts have large and small letters.
CASED = (
    "A-Za-z"
    "µÀ-ÖØ-öø-ƺƼ-ƿǄ-ʓʕ-ʯͰ-ͳͶͷͻ-ͽͿΆΈ-ΊΌΎ-ΡΣ-ϵϷ-ҁҊ-ԯԱ-ՖႠ-ჅᎠ-Ᏽᏸ-ᏽᲐ-ᲺᲽ-Ჿᴀ-ᴫᵫ-ᵷᵹ-ᶚḀ-ἕἘ-Ἕἠ-ὅὈ-Ὅ"
    "ὐ-ὗὙὛὝὟ-ώᾀ-ᾴᾶ-ᾼιῂ-ῄῆ-ῌῐ-ΐῖ-Ίῠ-Ῥῲ-ῴῶ-ῼℂℇℊ-ℓℕℙ-ℝℤΩℨK-ℭℯ-ℴℹℼ-ℿⅅ-ⅉⅎↃↄⰀ-ⱻⱾ-ⳤⳫ-ⳮⳲⳳꙀ-ꙭꚀ-ꚛ"
    "Ꜣ-ꝯꝱ-ꞇꞋ-ꞎꭰ-ꮿﬀ-ﬆﬓ-ﬗＡ-Ｚａ-ｚ𐐀-𐑏𐒰-𐓓𐓘-𐓻𐲀-𐲲𐳀-𐳲𑢠-𑣟𞤀-𞥃"
)
DEEPSEEK_LLM = (
    *("[\r\n]", rf"\s?[{CASED}]+", r"\s?[!-/:-~！-／：-～‘-‟　-。]+"),
    *(r"\s+$", "[一-龥ࠀ-一가-퟿]+", r"\p{N}+"),
)
DEEPSEEK_CODER = ("[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", "[一-龥ࠀ-一가-퟿]+", r"\p{N}")
SENTENCES = r" ?[^(\s|.,!?…。，、।۔،)]+"
FALCON = (r"[\p{P}\$\+<=>\^~\|`]+", GPT2, r"[0-9][0-9][0-9]")
# A file that names no rules is cut by these.
DEFAULT = (r"[\p{P}\$\+<=>\^~\|]+", GPT2, r"\p{N}+", r"[0-9][0-9][0-9]")

# Each entry has the names of rules, and the expressions that cut one after the other.
GROUPS: tuple[tuple[tuple[str, ...], tuple[str, ...]], ...] = (
    (("default",), DEFAULT),
    (("gpt-2", "phi-2", "gigachat", "a.x-4.0", "mellum", "mpt", "olmo", "jais"), (GPT2,)),
    (("trillion", "granite-docling", "exaone4"), (GPT2,)),
    (("smollm", "starcoder", "refact", "command-r", "codeshell", "exaone", "minerva-7b"), (r"\p{N}", GPT2)),
    (("mellum2",), (r"\p{N}", GPT2)),
    (("llama3", "llama-v3", "llama-bpe", "falcon3", "falcon-h1", "pixtral", "midm-2.0", "lfm2"), (LLAMA3,)),
    (("jina-v5-nano", "dbrx", "smaug-bpe", "chatglm-bpe", "glm4", "glm5"), (LLAMA3,)),
    (("qwen2", "deepseek-r1-qwen", "kormo", "f2llmv2", "megrez", "stablelm2"), (QWEN2,)),
    (("hunyuan", "solar-open", "grok-2"), (QWEN2,)),
    (("qwen35",), (QWEN35,)),
    (("gpt-4o", "llama4", "kanana2", "talkie", "minimax-m2"), (GPT4O,)),
    (("tekken",), (TEKKEN,)),
    (("kimi-k2",), (KIMI,)),
    (("youtu",), YOUTU),
    (("tiny_aya", "cohere2moe"), (r"\d{1,3}(?=(?:\d{3})*\b)", GPT4O)),
    (("deepseek-v3", "hunyuan-dense", "joyai-llm", "hy_v4"), DEEPSEEK3),
    (("deepseek-llm",), DEEPSEEK_LLM),
    (("deepseek-coder",), DEEPSEEK_CODER),
    (("spark2_5",), SPARK),
    (("seed-coder",), (SEED_CODER,)),
    (("bailingmoe", "bailingmoe2", "llada-moe"), (BAILING,)),
    (("exaone-moe",), (EXAONE_MOE,)),
    (("minicpm5",), (r"\p{N}{1,3}", MINICPM5)),
    (("superbpe",), (r"\p{N}+", r"(?=(\d{3})+(?!\d))")),
    (("laguna",), (r"[^\n]+|[\n]+", QWEN2)),
    (("ufakzeka",), (UFAKZEKA,)),
    (("jais-2",), (JAIS2,)),
    (("poro-chat", "bloom", "gpt3-finnish"), (SENTENCES,)),
    (("viking",), (SENTENCES, r"\p{N}")),
    (("falcon",), FALCON),
)
EXPRESSIONS = {name: expressions for names, expressions in GROUPS for name in names}
# Under these rules a piece of text that is a token is that token, whatever its merges say.
WHOLE_WORDS = {"llama3", "llama-v3", "llama-bpe", "falcon3", "falcon-h1", "pixtral", "midm-2.0", "lfm2"} | {
    *("jina-v5-nano", "tekken", "glm4", "glm5", "youtu", "minicpm5"),
}
# Under these rules every text begins with the first token.
BEGINS = WHOLE_WORDS - {"glm4", "glm5", "youtu", "minicpm5"}


def pre_tokenizer(rules: str | None) -> Any:
    """Returns the step that cuts a text and spells its bytes in letters; raises ``KeyError`` for unknown
    rules."""
    from tokenizers import Regex
    from tokenizers.pre_tokenizers import ByteLevel, Sequence, Split

    expressions = EXPRESSIONS[rules or "default"]
    splits = [Split(Regex(expression), behavior="isolated") for expression in expressions]
    return Sequence([*splits, ByteLevel(add_prefix_space=False, use_regex=False)])
