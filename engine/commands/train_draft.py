"""Trains a head that drafts for a target, from texts that the target writes itself.

    truedraft train-draft --target MODEL --prompts FILE --out FOLDER

A new head (EAGLE-3) goes into FOLDER, in the layout that vLLM reads, too; with ``--head mtp`` it is the MTP
head of the target's checkpoint, trained further. ``--draft FOLDER`` serves it. A run that was stopped
continues when it is started again. ``truedraft check`` measures the head's gain.
"""

import math
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

import torch
from transformers.utils import logging as transformers_logging

from truedraft.engine.commands.options import TrainSettings, with_models
from truedraft.engine.config import EngineConfig
from truedraft.engine.core.admission import RequestError
from truedraft.engine.errors import ModelLoadError
from truedraft.engine.llm import LLM
from truedraft.engine.messages import MTP
from truedraft.engine.models.decoder import FusedDecoder
from truedraft.engine.models.heads.loader import head_method
from truedraft.engine.models.heads.vocabulary import most_frequent
from truedraft.engine.models.options import load_options
from truedraft.engine.models.prompt_file import read_prompts
from truedraft.engine.training.eagle_head import EagleHead, layer_inputs
from truedraft.engine.training.mtp_head import MtpHead
from truedraft.engine.training.texts import Listener, Text, Writer
from truedraft.engine.training.trained_head import TrainedHead, stored_dtype
from truedraft.engine.training.trainer import Measured, Progress, Schedule, Trainer

DONE, FAILED = 0, 1
# Some tokens of the training texts are only counted, to rank the vocabulary.
COUNTED_SHARE = 0.05
# One prompt in ten is kept for validation, up to a largest number.
VALIDATION_STEP, MAX_VALIDATION = 10, 32
SAVE_SECONDS = 120.0
# Texts for validation have random numbers that no text for training has.
HELD_BACK = 1 << 40
# Training is measured this often, and lines of progress are this many seconds apart.
SHOWN, SHOW_SECONDS = 20, 30.0
# A stopped run can only continue with the same values of these settings.
OF_A_RUN = (
    *("target", "head", "tokens", "text_tokens", "temperature", "draft_vocab_size", "steps"),
    *("learning_rate", "texts_per_update"),
)


def main(settings: TrainSettings) -> int:
    transformers_logging.disable_progress_bar()
    try:
        train(with_models(settings))
    except (ModelLoadError, RequestError, OSError) as error:
        print(f"truedraft: {error}", file=sys.stderr)
        return FAILED
    return DONE


def train(settings: TrainSettings) -> Measured:
    """Trains the head, and returns its measured acceptance."""
    assert settings.prompts is not None
    prompts = read_prompts(settings.prompts)
    kept = prompts[::VALIDATION_STEP][:MAX_VALIDATION]
    # Duplicates are not held back for validation.
    learned = [prompt for prompt in prompts if prompt not in kept]
    _check_paths(settings)
    if not learned:
        _say(f"{settings.prompts} has no prompt to hold back: other texts with its prompts are measured")
    assert settings.out is not None
    chosen = {name: getattr(settings, name) for name in OF_A_RUN}
    progress = Progress(settings.out / "training.pt", chosen)
    listener = Listener(layer_inputs if settings.head is None else lambda num_layers: ())
    llm = LLM(settings.target, draft="none", proposer=listener, **_fields(settings))
    target = llm.core.target.model
    assert isinstance(target, FusedDecoder)  # Other targets have no hidden states that a head could read.
    held = Writer(llm, listener, kept, settings.text_tokens, settings.temperature)
    writer = Writer(llm, listener, learned or kept, settings.text_tokens, settings.temperature)
    head = _head(settings, target)
    _say(f"the target writes {len(kept)} texts that are held back")
    texts = held.write(HELD_BACK * len(kept), len(kept))
    return _Run(settings, target, head, writer, texts, progress).run()


def _check_paths(settings: TrainSettings) -> None:
    """Refuses a beginning that is no head, and an output folder that holds a model."""
    head, out = settings.head, settings.out
    assert out is not None
    if head is not None and head_method(head) != MTP:
        raise ModelLoadError(f"{head} is no MTP head: leave --head out to train a new EAGLE-3 head")
    is_read = head not in (None, MTP) and Path(str(head)).resolve() == out.resolve()
    if is_read or (any(out.glob("*.safetensors")) and head_method(str(out)) is None):
        raise ModelLoadError(
            f"{out} has a model, which would be written over: name another folder with --out"
        )


def _head(settings: TrainSettings, target: FusedDecoder) -> TrainedHead:
    assert settings.target is not None  # EngineConfig filled it in.
    options = load_options(settings)
    dtype = stored_dtype(settings.target, options)
    if settings.head is None:
        return EagleHead(settings.target, target, dtype)
    path = settings.target if settings.head == MTP else settings.head
    return MtpHead(path, target, options, dtype)


def _fields(settings: TrainSettings) -> dict[str, Any]:
    """Returns the engine's settings: without a draft, and without what earlier texts leave, as all states of
    a text are needed."""
    fields = {name: getattr(settings, name) for name in EngineConfig.model_fields}
    del fields["target"], fields["draft"]
    nothing_kept = {"prefix_caching": False, "prefix_cache_dir": None, "ngram_pool_tokens": None}
    return fields | nothing_kept | {"method": "auto", "num_speculative_tokens": 1}


class _Run:
    def __init__(
        self,
        settings: TrainSettings,
        target: FusedDecoder,
        head: TrainedHead,
        writer: Writer,
        validation: list[Text],
        progress: Progress,
    ) -> None:
        self.settings = settings
        self.target = target
        self.head = head
        self.writer = writer
        self.validation = validation
        self.texts_per_batch = settings.num_sequences_on(target.device.type)
        assert settings.out is not None
        self.out = settings.out
        self.out.mkdir(parents=True, exist_ok=True)
        self.progress = progress

    def run(self) -> Measured:
        trainer, num_texts = self._begin()
        budget, saved, shown = self.settings.tokens, time.perf_counter(), 0
        pace = _Pace(trainer.num_tokens, budget)
        while trainer.num_tokens < budget:
            pace.tell(trainer.num_tokens)
            measured = trainer.learn(self.writer.write(num_texts, self.texts_per_batch))
            num_texts += self.texts_per_batch
            if trainer.num_tokens >= budget or trainer.num_tokens - shown >= budget / SHOWN:
                shown = trainer.num_tokens
                _show(shown, measured, trainer.measure(self.validation))
                pace.tell(shown, is_due=True)
            if time.perf_counter() - saved > SAVE_SECONDS:
                self.head.save(self.out, trainer.module, trainer.token_ids)
                self.progress.save(trainer, num_texts)
                saved = time.perf_counter()
        self.head.save(self.out, trainer.module, trainer.token_ids)
        self.progress.path.unlink(missing_ok=True)
        found = trainer.measure(self.validation)
        print(f"wrote {self.out}: serve it with --draft {self.out}")
        return found

    def _begin(self) -> tuple[Trainer, int]:
        """Returns a trainer, and the number of texts that it has learnt from."""
        state, num_texts = self.progress.state, 0
        if state is None:
            token_ids, num_texts = self._vocabulary()
        else:
            token_ids, num_texts = state["token_ids"], state["num_texts"]
        with torch.random.fork_rng():
            torch.manual_seed(0)
            module = self.head.module(token_ids)
        settings, head, target = self.settings, self.head, self.target
        rate = settings.learning_rate or head.rate / target.config.hidden_size
        schedule = Schedule(settings.tokens, settings.steps, rate, settings.texts_per_update)
        trainer = Trainer(module, head.embeddings, target.weights, token_ids, schedule, target.device)
        if state is None:
            _show(0, started := trainer.measure(self.validation), started)
        else:
            module.load_state_dict(state["module"])
            trainer.optimizer.load_state_dict(state["optimizer"])
            trainer.num_tokens = state["num_tokens"]
            print(f"goes on after {trainer.num_tokens:,} tokens")
        return trainer, num_texts

    def _vocabulary(self) -> tuple[torch.Tensor | None, int]:
        """Returns the ids that the head drafts, or None for all, and the number of texts that were counted
        for it."""
        vocab_size = self.target.vocab_size
        asked = self.settings.draft_vocab_size
        most = vocab_size if asked == "full" else self.head.most_drafted
        size = int(min(vocab_size, asked if isinstance(asked, int) else most))
        if size >= vocab_size:
            return None, 0
        counts: Counter[int] = Counter()
        num_texts = 0
        budget = math.ceil(COUNTED_SHARE * self.settings.tokens)
        _say(f"the target writes texts of {budget:,} tokens, to count which it uses")
        pace = _Pace(0, budget)
        while counts.total() < budget:
            pace.tell(counts.total())
            for text in self.writer.write(num_texts, self.texts_per_batch):
                counts.update(text.token_ids)
            num_texts += self.texts_per_batch
        counts.update(token for prompt in self.writer.prompts for token in prompt)
        return most_frequent(counts, size, vocab_size, self.target.eos_token_ids), num_texts


class _Pace:
    """Reports how much of ``budget`` tokens is done, and about how long the rest takes."""

    def __init__(self, done: int, budget: int) -> None:
        self.first, self.budget = done, budget
        self.started = self.said = time.perf_counter()

    def tell(self, done: int, *, is_due: bool = False) -> None:
        """Prints a report every few seconds, or now if it ``is_due``."""
        now = time.perf_counter()
        if self.first < done < self.budget and (is_due or now - self.said > SHOW_SECONDS):
            self.said = now
            left = (now - self.started) * (self.budget - done) / (done - self.first)
            _say(f"{done:,} of {self.budget:,} tokens, about {in_words(left)} to go")


def in_words(seconds: float) -> str:
    """Returns a length of time in its largest unit."""
    for unit, size in (("h", 3600), ("min", 60)):
        if seconds >= size:
            return f"{seconds / size:.1f} {unit}"
    return f"{seconds:.0f} s"


def _say(words: str) -> None:
    print(words, flush=True)


def _show(num_tokens: int, learned: Measured, held: Measured) -> None:
    rates = " ".join(f"{rate:.0%}" for rate in held.acceptance)
    print(
        f"{num_tokens:>12,} tokens  loss {learned.loss:.3f}  acceptance by position {rates}  "
        f"{held.tokens_per_round:.2f} tokens a round",
        flush=True,
    )
