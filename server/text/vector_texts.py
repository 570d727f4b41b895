"""Prepares the texts of requests for vectors and scores: prompts, pairs, and cutting where that is asked for.

Called by the routes, in a thread, because many texts take a while to encode.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from truedraft.engine.messages import EmbeddingFacts, Text
from truedraft.server.errors import ContextLengthError, InvalidRequestError
from truedraft.server.schemas.embeddings import EmbeddingRequest, VectorRequest
from truedraft.server.text.prompt import PromptLimits, check_characters, check_token_ids
from truedraft.server.text.tokenizer import Tokenizer

# Names that models give to the prompts of what is searched for and of what is searched.
PROMPTS_OF = {"query": ("query", "search_query"), "document": ("document", "passage", "search_document")}
# Templates of pairs (``EmbeddingFacts``) have this in the place of the second text.
DOCUMENT = "{document}"


@dataclass(frozen=True, slots=True)
class Reading:
    """Says how texts become tokens for one request."""

    tokenizer: Tokenizer
    facts: EmbeddingFacts
    limits: PromptLimits
    body: VectorRequest

    def encode(
        self, pairs: Sequence[tuple[str, str | None]], param: str, *, add_special_tokens: bool = True
    ) -> list[Text]:
        """Returns the tokens of texts, each alone or in a pair."""
        self._check_characters(sum(len(text) for pair in pairs for text in pair if text), param)
        if self.facts.lower_cases:
            pairs = [(first.lower(), None if second is None else second.lower()) for first, second in pairs]
        found = self.tokenizer.encode_pairs(
            pairs,
            self._most(),
            keeps_end=self.body.truncation_side == "left",
            add_special_tokens=add_special_tokens,
        )
        return [self._checked(Text(*each), param, index) for index, each in enumerate(found)]

    def given(self, lists: Sequence[list[int]]) -> list[Text]:
        """Returns token ids that a client has sent, as texts."""
        most, texts = self._most(), []
        for index, ids in enumerate(lists):
            check_token_ids(ids, self.limits.vocab_size, "input")
            if most is not None and len(ids) > most:
                ids = ids[-most:] if self.body.truncation_side == "left" else ids[:most]
            texts.append(self._checked(Text(ids), "input", index))
        return texts

    def asked(
        self, queries: Sequence[str], documents: Sequence[str], instruction: str | None, param: str
    ) -> list[Text]:
        """Returns pairs as a model reads them that is asked in words. Of what is too long the document is
        cut."""
        self._check_characters(sum(map(len, queries)) + sum(map(len, documents)), param)
        before, after = self.facts.pair_template.split(DOCUMENT)
        before = before.replace(
            "{instruction}", self.facts.instruction if instruction is None else instruction
        )
        # A request often has one query for all of its documents.
        distinct = [*dict.fromkeys(queries)]
        framing = [*(before.replace("{query}", query) for query in distinct), after]
        encoded = self.tokenizer.encode_pairs(
            [(part, None) for part in framing], None, add_special_tokens=False
        )
        *firsts, last = (ids for ids, _ in encoded)
        first_of, most = dict(zip(distinct, firsts, strict=True)), self._most()
        texts = []
        for index, (query, document) in enumerate(zip(queries, documents, strict=True)):
            first = first_of[query]
            room = None if most is None else max(0, most - len(first) - len(last))
            ((middle, _),) = self.tokenizer.encode_pairs(
                [(document, None)],
                room,
                keeps_end=self.body.truncation_side == "left",
                add_special_tokens=False,
            )
            texts.append(self._checked(Text([*first, *middle, *last]), param, index))
        return texts

    def _most(self) -> int | None:
        """Returns how many tokens the request lets a text have; None if longer ones are refused."""
        asked = self.body.truncate_prompt_tokens
        if asked is None:
            return None
        return self.limits.max_tokens if asked == -1 else min(asked, self.limits.max_tokens)

    def _check_characters(self, number: int, param: str) -> None:
        check_characters(number, self.limits, param)

    def _checked(self, text: Text, param: str, index: int) -> Text:
        if not text.token_ids:
            raise InvalidRequestError(f"Text {index} of {param} has no tokens.", param=param)
        if (most := self._most()) is not None and len(text.token_ids) > most:
            raise InvalidRequestError(
                f"The tokens around text {index} of {param} are already {len(text.token_ids)}: "
                f"truncate_prompt_tokens must be more than {most}.",
                param="truncate_prompt_tokens",
            )
        if len(text.token_ids) > self.limits.max_tokens:
            raise ContextLengthError(
                f"{self.limits.context}, but text {index} of {param} has {len(text.token_ids)}. "
                "'truncate_prompt_tokens': -1 cuts what is too long.",
                param=param,
            )
        return text


def prompt_of(facts: EmbeddingFacts, name: str | None, kind: str | None) -> str:
    """Returns the prompt that stands before a text: the one of that name, the one for that kind of text, or
    the model's own."""
    if name is not None and kind is not None:
        raise InvalidRequestError("Give prompt_name or input_type, not both.", param="input_type")
    if name is not None:
        if name not in facts.prompts:
            there = ", ".join(map(repr, facts.prompts)) or "none"
            raise InvalidRequestError(
                f"The model has no prompt {name!r}; it has {there}.", param="prompt_name"
            )
        return facts.prompts[name]
    if kind is not None:
        names = [each for each in PROMPTS_OF[kind] if each in facts.prompts]
        return facts.prompts[names[0]] if names else ""
    return "" if facts.default_prompt is None else facts.prompts[facts.default_prompt]


def input_texts(body: EmbeddingRequest, reading: Reading) -> list[Text]:
    """Returns the texts of a request for embeddings."""
    prompt = prompt_of(reading.facts, body.prompt_name, body.input_type)
    given = [body.input] if isinstance(body.input, str) else body.input
    token_ids = [each for each in given if isinstance(each, int)]
    lists = [token_ids] if token_ids else [each for each in given if isinstance(each, list)]
    if lists:
        if body.prompt_name is not None or body.input_type is not None:
            param = "input_type" if body.prompt_name is None else "prompt_name"
            raise InvalidRequestError(
                f"Token ids have no prompt before them: leave out {param}.", param=param
            )
        return reading.given(lists)
    texts = [(prompt + each, None) for each in given if isinstance(each, str)]
    return reading.encode(texts, "input", add_special_tokens=body.add_special_tokens is not False)


def num_inputs(body: EmbeddingRequest) -> int:
    given = body.input
    return 1 if isinstance(given, str) or isinstance(given[0], int) else len(given)
