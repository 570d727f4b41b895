"""Finds the tokens that keep the output within a grammar, at every position of a round.

llguidance parses. A ``Matcher`` is one sequence's place in its grammar: it knows the tokens that the sequence
has emitted, and nothing of drafts between calls. The target's distribution under a grammar is the processed
one over the allowed tokens of each position, given the text before it.
"""

from collections import OrderedDict
from collections.abc import Callable, Iterable
from concurrent.futures import Future
from contextlib import suppress
from ctypes import memset
from threading import Lock, Thread
from weakref import finalize

import torch
from llguidance import LLMatcher, LLTokenizer

from truedraft.engine.machine.deep_stack import start_on_deep_stack
from truedraft.engine.machine.heap import heap_in_use, trim_heap
from truedraft.engine.memory.pointers import address
from truedraft.engine.messages import SamplingParams
from truedraft.engine.sampling.grammar_compiler import GrammarError, compile_grammar, error_of
from truedraft.engine.sampling.thinking import ThinkingBudget

# This many compiled grammars are kept, with up to this much memory together; the least recently used are
# dropped first.
MAX_KEPT = 64
MAX_KEPT_BYTES = 256 << 20
WORD_BITS, WORD_BYTES = 32, 4


class Matcher:
    """Follows one sequence. ``mask_words`` is the size of a position's mask, in words of 32 tokens.
    ``end_ids`` end the sequence: known text is not drafted beyond them, and the matcher does not advance over
    them. ``num_read`` of the sequence's emitted tokens have been read. The grammar starts after the first
    occurrence of ``after`` among them: before that, everything is allowed."""

    budget_spent = False  # The sequence has no grammar.

    def __init__(self, parser: LLMatcher, vocab_size: int, end_ids: frozenset[int], after: list[int]) -> None:
        self._parser = parser
        self._end_ids = end_ids
        self.mask_words = -(-vocab_size // WORD_BITS)
        self.num_read = 0
        self._after = after  # It is empty once the mark has occurred.
        self._tail: list[int] = []  # These are the last tokens, which may be the beginning of the mark.
        self._ahead: list[int] = []  # The parser has read these drafts beyond the emitted tokens.

    def masks(self, draft_ids: list[int], first: int = 0) -> torch.Tensor | None:
        """Returns the tokens allowed after ``first`` of the drafts, and after each further one: int32
        [positions, words]. None: all are allowed, everywhere."""
        shape = len(draft_ids) + 1 - first, self.mask_words
        masks = torch.empty(shape, dtype=torch.int32)
        return masks if self.write_masks(address(masks, torch.int32, shape), draft_ids, first) else None

    def write_masks(self, place: int, draft_ids: list[int], first: int = 0) -> bool:
        """Writes ``masks``; returns False, and writes nothing, where that would be None. Everything is
        allowed after a draft that ends the sequence, nothing after one that was not allowed itself, or where
        the parser has given up. If a draft only grows, reading goes on where the last call has left it."""
        start = self._start_in(draft_ids)
        if start is None:
            return False
        text = self._before_end(draft_ids)
        begin, end = max(start, first), len(text) + 1
        size = WORD_BYTES * self.mask_words
        if begin > first or end <= len(draft_ids):
            memset(place, -1, size * (len(draft_ids) + 1 - first))
        if begin >= end:
            return True
        own = place + size * (begin - first)
        memset(own, 0, size * (end - begin))
        if self._look_ahead(text[start:begin]):
            # The size is that of one position's mask; all of them are written, and the parser stays.
            self._parser.unsafe_compute_mask_ptr_with_draft_token(own, size, text[begin:])  # type: ignore[attr-defined]  # lacks a stub
            if self._parser.is_error():
                memset(own, 0, size * (end - begin))
        return True

    def forced(self, limit: int) -> list[int]:
        """Returns up to ``limit`` tokens, each of which is the only one allowed after those before it."""
        if limit == 0 or self._after:
            return []
        self._look_ahead([])
        return self._before_end(self._parser.compute_ff_tokens()[:limit])

    def allowed(self, token_ids: list[int]) -> list[int]:
        """Returns the first of these tokens that could follow, without ending the sequence."""
        token_ids = self._before_end(token_ids)
        start = self._start_in(token_ids)
        if start is None:
            return token_ids
        self._look_ahead([])
        return token_ids[: start + self._parser.validate_tokens(token_ids[start:])]

    def advance(self, token_ids: list[int]) -> None:
        """Takes tokens that the sequence has emitted; it goes on after them."""
        self.num_read += len(token_ids)
        start = self._start_in(token_ids)
        if start is None:
            self._tail = [*self._tail, *token_ids][-len(self._after) :]
            return
        self._after = []
        self._look_ahead([])
        self._parser.consume_tokens(token_ids[start:])

    @property
    def error(self) -> str:
        """Says why the parser has given up; empty if it has not."""
        return error_of(self._parser)

    def _look_ahead(self, token_ids: list[int]) -> bool:
        """Moves the parser to the end of these drafts; returns False if it allows fewer."""
        ahead = self._ahead
        if ahead != token_ids[: len(ahead)]:
            self._parser.rollback(len(ahead))
            ahead.clear()
        missing = token_ids[len(ahead) :]
        if missing:
            ahead += missing[: self._parser.try_consume_tokens(missing)]
        return len(ahead) == len(token_ids)

    def _start_in(self, token_ids: list[int]) -> int | None:
        """Counts the next tokens that are free; None: all of them, and the grammar has not started by
        then."""
        if not self._after:
            return 0
        text = [*self._tail, *token_ids]
        for end in range(len(self._tail) + 1, len(text) + 1):
            if text[max(0, end - len(self._after)) : end] == self._after:
                return end - len(self._tail)
        return None

    def _before_end(self, token_ids: list[int]) -> list[int]:
        if self._end_ids.isdisjoint(token_ids):
            return token_ids
        ends = (place for place, token_id in enumerate(token_ids) if token_id in self._end_ids)
        return token_ids[: next(ends)]


class Grammars:
    """Compiles grammars for one tokenizer, which ``load`` returns when the first one is needed."""

    def __init__(self, load: Callable[[], LLTokenizer]) -> None:
        self._load = load
        self._loading = Lock()
        self._tokenizer: LLTokenizer | None = None
        # Each matcher is at its start; the second value is the first sequence's matcher.
        self._compiled: OrderedDict[str, tuple[LLMatcher, LLMatcher]] = OrderedDict()
        self._beside: dict[str, Future[LLMatcher]] = {}
        self._heap_without: int | None = None  # heap in use when no grammar was kept, in bytes

    @property
    def tokenizer(self) -> LLTokenizer:
        """Returns the tokenizer; raises ``GrammarError`` if there is none."""
        with self._loading:
            if self._tokenizer is None:
                self._tokenizer = self._load()
            return self._tokenizer

    def preload(self) -> None:
        """Loads the tokenizer in a thread of its own, so that the first request does not wait for it, nor
        others for that."""
        Thread(target=self._preload, name="grammars", daemon=True).start()

    def _preload(self) -> None:
        with suppress(GrammarError):
            _ = self.tokenizer
        trim_heap()

    def compile_beside(self, grammar: str) -> Future[LLMatcher] | None:
        """Compiles a grammar in a thread of its own, for a later call of ``matcher``; returns None if it is
        compiled."""
        if grammar in self._compiled:
            return None
        if grammar not in self._beside:
            self._beside[grammar] = start_on_deep_stack(lambda: compile_grammar(self.tokenizer, grammar))
        return self._beside[grammar]

    def matcher(self, grammar: str, after: Iterable[int] = ()) -> Matcher:
        """Returns a matcher at the start of ``grammar``, or before ``after``; raises ``GrammarError`` if
        nothing matches the grammar."""
        self.trim()
        kept = self._compiled.pop(grammar, None)
        if kept is None:
            beside = self._beside.pop(grammar, None)
            start = compile_grammar(self.tokenizer, grammar) if beside is None else beside.result()
            parser = start.deep_copy()
            kept = start, parser
        else:
            start, first = kept
            # The lexer of the first sequence knows more states already.
            parser = first.deep_copy()
            if not parser.reset():
                parser = start.deep_copy()
        self._compiled[grammar] = kept
        if len(self._compiled) > MAX_KEPT:
            self._compiled.popitem(last=False)
        tokenizer = self.tokenizer
        end_ids = frozenset(tokenizer.eos_tokens)
        matcher = Matcher(parser, tokenizer.vocab_size, end_ids, list(after))
        finalize(matcher, self.trim).atexit = False
        return matcher

    def constraint(self, params: SamplingParams, vocab_size: int) -> "Matcher | ThinkingBudget | None":
        """Returns the constraint of a request on its output's tokens; None if there is none."""
        matcher = None if params.grammar is None else self.matcher(params.grammar, params.grammar_after)
        if params.thinking_budget is None:
            return matcher
        return ThinkingBudget(params.thinking_budget, params.thinking_marks, vocab_size, matcher)

    def trim(self) -> None:
        """Drops grammars that have given up, and others while all together take too much: a parser grows as
        sequences run.

        llguidance does not say how much one takes, so the growth of the heap is attributed to all of them.
        Growth for other reasons shows when no grammar is kept any more.
        """
        for grammar, (_, first) in [*self._compiled.items()]:
            if first.is_error():
                self._compiled.pop(grammar, None)
        while self._compiled and self._num_bytes() > MAX_KEPT_BYTES:
            self._compiled.popitem(last=False)
        if not self._compiled:
            self._heap_without = heap_in_use()

    def _num_bytes(self) -> int:
        in_use = heap_in_use()
        return 0 if in_use is None or self._heap_without is None else in_use - self._heap_without
