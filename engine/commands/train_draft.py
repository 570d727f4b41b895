"""Train a head that drafts for a target, from texts that the target writes itself.

    truedraft train-draft --target MODEL --prompts FILE --out FOLDER

The head (EAGLE-3) goes into FOLDER, in the layout that vLLM reads, too; ``--draft FOLDER`` serves it. A
stopped run goes on where it was. ``truedraft check`` says what the head gains.
"""

import sys
import time
from collections import Counter
from pathlib import Path
from typing import Annotated, Any, Literal, Self

import torch
from pydantic import Field, model_validator
from pydantic_settings import BaseSettings
from transformers.utils import logging as transformers_logging

from truedraft.engine.commands.options import command_options
from truedraft.engine.config import EngineConfig
from truedraft.engine.core.admission import RequestError
from truedraft.engine.errors import ModelLoadError
from truedraft.engine.llm import LLM
from truedraft.engine.models.decoder import FusedDecoder
from truedraft.engine.models.heads.vocabulary import most_frequent
from truedraft.engine.models.prompt_file import read_prompts
from truedraft.engine.training.eagle_module import EagleModule, HeadShape
from truedraft.engine.training.export import save_head
from truedraft.engine.training.texts import Listener, Text, Writer
from truedraft.engine.training.trainer import Measured, Progress, Schedule, Trainer, start_from_target

DONE, FAILED = 0, 1
# Heads of larger vocabularies draft the most frequent tokens only.
LARGE_VOCABULARY = 32_768
# A part of the tokens to learn from is only counted, to rank the vocabulary.
COUNTED_SHARE = 0.05
# One prompt in ten is kept for validation, up to a largest number.
VALIDATION_STEP, MAX_VALIDATION = 10, 32
# The learning rate times the hidden size, as larger heads take smaller steps.
RATE = 0.6
SAVE_SECONDS = 120.0
# Lines of progress.
SHOWN = 20
ROPE_THETA = 10_000.0


class TrainSettings(EngineConfig, BaseSettings):
    """Train a head that drafts for a target, from texts that the target writes itself."""

    model_config = command_options("train-draft")

    prompts: Path | None = Field(
        None,
        description="File of prompts that texts begin with: one a line, or in a .jsonl file objects with "
        "'messages' or 'prompt'.",
    )
    out: Path | None = Field(None, description="Folder for the head.")
    tokens: int = Field(1_000_000, ge=1, description="Tokens to learn from, written by the target.")
    text_tokens: int = Field(256, ge=8, description="Tokens of a text, its prompt included.")
    temperature: float = Field(1.0, ge=0, le=2, description="Temperature at which the target writes.")
    draft_vocab_size: Annotated[int, Field(ge=1)] | Literal["auto", "full"] = Field(
        "auto",
        description="Tokens that the head drafts, the most frequent ones of the texts; full: all. auto: all, "
        f"but no more than {LARGE_VOCABULARY}.",
    )
    steps: int = Field(4, ge=1, le=8, description="Drafted tokens that the head is trained for.")
    learning_rate: float | None = Field(
        None, gt=0, description=f"Largest learning rate. Default: {RATE} by the target's hidden size."
    )
    texts_per_update: int = Field(1, ge=1, description="Texts of one step of the optimiser.")

    @model_validator(mode="after")
    def _has_files(self) -> Self:
        if self.prompts is None or self.out is None:
            raise ValueError("--prompts names the file of prompts, and --out the folder for the head")
        return self


def main(settings: TrainSettings) -> int:
    transformers_logging.disable_progress_bar()
    try:
        train(settings)
    except (ModelLoadError, RequestError, OSError) as error:
        print(f"truedraft: {error}", file=sys.stderr)
        return FAILED
    return DONE


def train(settings: TrainSettings) -> Measured:
    """Returns what the trained head is measured to accept."""
    assert settings.prompts is not None
    prompts = read_prompts(settings.prompts)
    kept = prompts[::VALIDATION_STEP][:MAX_VALIDATION]
    learned = [prompt for number, prompt in enumerate(prompts) if number % VALIDATION_STEP] or kept
    listener = Listener()
    llm = LLM(settings.target, draft="none", proposer=listener, **_fields(settings))
    target = llm.core.target.model
    assert isinstance(target, FusedDecoder)  # others have no states to listen to
    held = Writer(llm, listener, kept, settings.text_tokens, settings.temperature)
    writer = Writer(llm, listener, learned, settings.text_tokens, settings.temperature)
    return _Run(settings, target, writer, held.write(0, len(kept)), listener.layer_inputs).run()


def _fields(settings: TrainSettings) -> dict[str, Any]:
    """Returns the engine's settings: without a draft of its own, and with all of a text computed."""
    fields = {name: getattr(settings, name) for name in EngineConfig.model_fields}
    del fields["target"], fields["draft"]
    return fields | {"method": "auto", "num_speculative_tokens": 1, "prefix_caching": False}


class _Run:
    def __init__(
        self,
        settings: TrainSettings,
        target: FusedDecoder,
        writer: Writer,
        validation: list[Text],
        layer_inputs: tuple[int, ...],
    ) -> None:
        self.settings = settings
        self.target = target
        self.writer = writer
        self.validation = validation
        self.layer_inputs = layer_inputs
        self.texts_per_batch = settings.num_sequences_on(target.device.type)
        assert settings.out is not None
        self.out = settings.out
        self.out.mkdir(parents=True, exist_ok=True)
        names = (
            "target",
            "tokens",
            "text_tokens",
            "temperature",
            "draft_vocab_size",
            "steps",
            "learning_rate",
        )
        chosen = {name: getattr(settings, name) for name in (*names, "texts_per_update")}
        self.progress = Progress(self.out / "training.pt", chosen)

    def run(self) -> Measured:
        trainer, num_texts = self._begin()
        budget, saved, shown = self.settings.tokens, time.perf_counter(), 0
        while trainer.num_tokens < budget:
            measured = trainer.learn(self.writer.write(num_texts, self.texts_per_batch))
            num_texts += self.texts_per_batch
            if trainer.num_tokens >= budget or trainer.num_tokens - shown >= budget / SHOWN:
                shown = trainer.num_tokens
                _show(shown, measured, trainer.measure(self.validation))
            if time.perf_counter() - saved > SAVE_SECONDS:
                self._save(trainer)
                self.progress.save(trainer, num_texts)
                saved = time.perf_counter()
        self._save(trainer)
        self.progress.path.unlink(missing_ok=True)
        found = trainer.measure(self.validation)
        print(f"wrote {self.out}: serve it with --draft {self.out}")
        return found

    def _begin(self) -> tuple[Trainer, int]:
        """Returns a trainer, and the number of texts that it has seen."""
        state, num_texts = self.progress.load(), 0
        if state is None:
            token_ids, num_texts = self._vocabulary()
        else:
            token_ids, num_texts = state["token_ids"], state["num_texts"]
        num_drafted = self.target.vocab_size if token_ids is None else len(token_ids)
        with torch.random.fork_rng():
            torch.manual_seed(0)
            module, weights = EagleModule(self._shape(num_drafted)), self.target.weights
        settings, size = self.settings, self.target.config.hidden_size
        schedule = Schedule(
            settings.tokens, settings.steps, settings.learning_rate or RATE / size, settings.texts_per_update
        )
        trainer = Trainer(module, weights, token_ids, schedule, self.target.device)
        if state is None:
            start_from_target(module, weights, token_ids)
        else:
            module.load_state_dict(state["module"])
            trainer.optimizer.load_state_dict(state["optimizer"])
            trainer.num_tokens = state["num_tokens"]
            print(f"goes on after {trainer.num_tokens:,} tokens")
        return trainer, num_texts

    def _vocabulary(self) -> tuple[torch.Tensor | None, int]:
        """Returns the ids that the head drafts, None: all; and how many texts it took to find that out."""
        vocab_size = self.target.vocab_size
        asked = self.settings.draft_vocab_size
        most = vocab_size if asked == "full" else LARGE_VOCABULARY
        size = min(vocab_size, asked if isinstance(asked, int) else most)
        if size >= vocab_size:
            return None, 0
        counts: Counter[int] = Counter()
        num_texts = 0
        while counts.total() < COUNTED_SHARE * self.settings.tokens:
            for text in self.writer.write(num_texts, self.texts_per_batch):
                counts.update(text.token_ids)
            num_texts += self.texts_per_batch
        counts.update(token for prompt in self.writer.prompts for token in prompt)
        return most_frequent(counts, size, vocab_size, self.target.eos_token_ids), num_texts

    def _shape(self, num_drafted: int) -> HeadShape:
        config = self.target.config
        heads = config.num_attention_heads
        rope = getattr(config, "rope_parameters", None) or {}
        return HeadShape(
            hidden_size=config.hidden_size,
            intermediate_size=config.intermediate_size,
            num_heads=heads,
            num_kv_heads=getattr(config, "num_key_value_heads", heads),
            head_dim=getattr(config, "head_dim", None) or config.hidden_size // heads,
            taps=len(self.layer_inputs),
            num_drafted=num_drafted,
            rope_theta=float(rope.get("rope_theta", ROPE_THETA)),
            eps=float(getattr(config, "rms_norm_eps", 1e-6)),
        )

    def _save(self, trainer: Trainer) -> None:
        stored = getattr(self.target.config, "dtype", None)
        dtype = stored if stored in (torch.float16, torch.bfloat16) else torch.float32
        assert self.settings.target is not None  # filled in by EngineConfig
        named = self.settings.target, self.target.config, dtype
        save_head(self.out, trainer.module, trainer.token_ids, self.layer_inputs, *named)


def _show(num_tokens: int, learned: Measured, held: Measured) -> None:
    rates = " ".join(f"{rate:.0%}" for rate in held.acceptance)
    print(
        f"{num_tokens:>12,} tokens  loss {learned.loss:.3f}  acceptance by position {rates}  "
        f"{held.tokens_per_round:.2f} tokens a round",
        flush=True,
    )
