"""Trains a head on texts as its target writes them, and measures how many of its drafts would be accepted."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils.rnn import pad_sequence

from truedraft.engine.errors import ModelLoadError
from truedraft.engine.layers.decoder import DecoderWeights
from truedraft.engine.layers.linear import Embeddings
from truedraft.engine.training.texts import Text

# Each further step has a lower weight, as fewer rounds reach it.
STEP_DECAY = 0.8
WARM_UP, LAST_RATE = 0.05, 0.02
MAX_GRADIENT = 1.0
# The target's full logits are in memory for this many rows at a time.
ROWS = 256


@dataclass(frozen=True)
class Schedule:
    """Holds the plan of training: ``num_tokens`` to learn from, and ``num_steps`` ahead at each of them."""

    num_tokens: int
    num_steps: int
    learning_rate: float
    texts_per_update: int

    def rate(self, seen: int) -> float:
        """Returns the learning rate after this many tokens: it rises, and falls along a cosine."""
        share = min(1.0, seen / self.num_tokens)
        falling = LAST_RATE + (1 - LAST_RATE) * 0.5 * (1 + math.cos(math.pi * share))
        return self.learning_rate * min(falling, (share + 0.1 * WARM_UP) / WARM_UP)


@dataclass(frozen=True)
class Measured:
    """Holds measurements. ``acceptance`` is for each step the probability that the target accepts a token
    that the head draws at temperature 1, if it has accepted those before it."""

    loss: float
    acceptance: list[float]

    @property
    def tokens_per_round(self) -> float:
        """Returns the tokens that a round with this many drafts emits."""
        total = reached = 1.0
        for rate in self.acceptance:
            reached *= rate
            total += reached
        return total


class Trainer:
    """Trains ``module``, which computes the head's logits of states and embeddings, step by step, for the
    tokens ``token_ids``, None: all. Its inputs are ``embeddings``; it learns to predict what the target does,
    whose ``weights`` are given."""

    def __init__(
        self,
        module: nn.Module,
        embeddings: Embeddings,
        weights: DecoderWeights,
        token_ids: torch.Tensor | None,
        schedule: Schedule,
        device: torch.device,
    ) -> None:
        self.module = module.to(device)
        self.embeddings = embeddings
        self.weights = weights
        self.token_ids = None if token_ids is None else token_ids.to(device)
        self.schedule = schedule
        self.device = device
        self.optimizer = torch.optim.AdamW(
            module.parameters(), lr=schedule.learning_rate, betas=(0.9, 0.95), weight_decay=0.0
        )
        self.num_tokens = 0

    def learn(self, texts: Sequence[Text]) -> Measured:
        """Learns from each text once."""
        found = []
        for first in range(0, len(texts), self.schedule.texts_per_update):
            for group in self.optimizer.param_groups:
                group["lr"] = self.schedule.rate(self.num_tokens)
            batch = texts[first : first + self.schedule.texts_per_update]
            loss, measured = self._run(batch)
            self.optimizer.zero_grad(set_to_none=True)
            loss.backward()  # type: ignore[no-untyped-call]
            torch.nn.utils.clip_grad_norm_(self.module.parameters(), MAX_GRADIENT)
            self.optimizer.step()
            self.num_tokens += sum(len(text.token_ids) for text in batch)
            found.append(measured)
        return _mean(found)

    @torch.no_grad()
    def measure(self, texts: Sequence[Text]) -> Measured:
        size = self.schedule.texts_per_update
        return _mean([self._run(texts[first : first + size])[1] for first in range(0, len(texts), size)])

    def _run(self, texts: Sequence[Text]) -> tuple[torch.Tensor, Measured]:
        """Returns the loss of a batch: cross-entropy and total variation to the target's distributions."""
        num_steps = self.schedule.num_steps
        ids = [torch.tensor(text.token_ids, device=self.device) for text in texts]
        hidden = pad_sequence([text.hidden.float() for text in texts], batch_first=True)
        teacher = pad_sequence([self._teacher(text) for text in texts], batch_first=True)
        places = hidden.shape[1]
        padded = F.pad(pad_sequence(ids, batch_first=True), (0, num_steps))
        embedded = [self._embed(padded[:, 1 + step : 1 + step + places]) for step in range(num_steps)]
        lengths = torch.tensor([len(text.token_ids) - 1 for text in texts], device=self.device)
        loss, acceptance = torch.zeros((), device=self.device), []
        with torch.autocast(self.device.type, torch.bfloat16, enabled=self.device.type == "cuda"):
            logits = self.module(hidden, embedded)
        for step, each in enumerate(logits):
            # A place has the state of its token and the token after it, and predicts the one that follows.
            is_known = torch.arange(places, device=self.device) + 1 + step < lengths[:, None]
            wanted = teacher[:, 1 + step :][is_known[:, : places - 1 - step]]
            guessed = each.float()[is_known].log_softmax(-1)
            entropy = -(wanted * guessed).sum(-1).mean()
            overlap = torch.minimum(wanted, guessed.exp()).sum(-1).mean()
            loss = loss + STEP_DECAY**step * (entropy - overlap)
            acceptance.append(float(overlap.detach()))
        return loss, Measured(float(loss.detach()), acceptance)

    @torch.no_grad()
    def _teacher(self, text: Text) -> torch.Tensor:
        """Returns the target's probabilities [tokens, drafted tokens] after each token."""
        parts = []
        for normed in torch.split(text.hidden[:, -1], ROWS):
            logits = self.weights.head(normed.contiguous()).float()
            if self.weights.softcap is not None:
                logits = torch.tanh(logits / self.weights.softcap) * self.weights.softcap
            probs = logits.softmax(-1)
            parts.append(probs if self.token_ids is None else probs.index_select(1, self.token_ids))
        return torch.cat(parts)

    @torch.no_grad()
    def _embed(self, token_ids: torch.Tensor) -> torch.Tensor:
        vectors = self.embeddings.look_up(token_ids.flatten()).float()
        return vectors.view(*token_ids.shape, -1)


def _mean(found: list[Measured]) -> Measured:
    columns = zip(*(each.acceptance for each in found), strict=True)
    return Measured(
        sum(each.loss for each in found) / len(found), [sum(column) / len(found) for column in columns]
    )


class Progress:
    """Keeps the progress of training in a file, so that a stopped run can continue: ``state`` is what was
    saved, None if nothing was. Raises ``ModelLoadError`` if the file belongs to another run."""

    def __init__(self, path: Path, settings: dict[str, Any]) -> None:
        self.path = path
        self.settings = settings
        self.state = self._load()

    def save(self, trainer: Trainer, num_texts: int) -> None:
        state = {
            "settings": self.settings,
            "module": trainer.module.state_dict(),
            "optimizer": trainer.optimizer.state_dict(),
            "token_ids": trainer.token_ids,
            "num_tokens": trainer.num_tokens,
            "num_texts": num_texts,
        }
        temporary = self.path.with_suffix(".new")
        torch.save(state, temporary)
        temporary.replace(self.path)

    def _load(self) -> dict[str, Any] | None:
        if not self.path.exists():
            return None
        state: dict[str, Any] = torch.load(self.path, map_location="cpu", weights_only=True)
        if state["settings"] != self.settings:
            names = [name for name, value in self.settings.items() if state["settings"].get(name) != value]
            raise ModelLoadError(
                f"{self.path} belongs to a run with other settings ({', '.join(names)}): repeat these, or "
                "remove the file to begin anew"
            )
        return state
