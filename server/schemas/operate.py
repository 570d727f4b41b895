"""Answers of the endpoints for operators and probes: health, readiness, version, speculation."""

from typing import Any, Literal

from pydantic import BaseModel, Field

from truedraft.engine.messages import Method, Source
from truedraft.server.schemas.answer import is_none

WorkerStatus = Literal["ready", "loading", "restarting", "failed", "stopped"]


class WorkerHealth(BaseModel):
    model: str | None = Field(None, exclude_if=is_none, description="Its model, of several.")
    worker: int = Field(description="The worker's number, as in the label `worker` of metrics.")
    status: WorkerStatus
    reason: str | None = Field(None, exclude_if=is_none, description="Why not; absent when ready.")
    device: str | None = Field(description="The worker's device; null unless it is ready.")
    sequences: int = Field(description="Sequences that the worker has not finished yet.")


class Health(BaseModel):
    status: Literal["ok"] = "ok"
    workers: list[WorkerHealth]


class Readiness(BaseModel):
    """A model is ready as soon as one of its workers is."""

    status: WorkerStatus | Literal["draining", "fetching", "unloading", "sleeping"]
    reason: str | None = Field(None, exclude_if=is_none, description="Why not; absent when ready.")


class Version(BaseModel):
    """What is only known once the models are loaded is null until then."""

    name: Literal["truedraft"] = "truedraft"
    version: str
    model: str = Field(description="The name that requests use in 'model'.")
    target: str
    draft: str | None
    device: str | None
    dtype: str | None = Field(description="Number type in which linear layers multiply.")
    weights: list[str] | None = Field(
        description="Types that the target's weights are kept in, most of them first."
    )
    forward: str | None = Field(
        description="What computes the target's layers: fused layers in C, Triton or torch, or transformers' "
        "layers, which are slower."
    )
    system_fingerprint: str | None = Field(description="The `system_fingerprint` of answers.")


class PositionAcceptance(BaseModel):
    """Counts all drafts since the worker started, whatever their method."""

    position: int = Field(description="0 for the first token of a draft, as in the metrics.")
    drafted: int
    accepted: int
    rate: float


class Speedup(BaseModel):
    """Compares with plain decoding of the same rows, whose cost is measured now and then; else null."""

    predicted: float | None = Field(description="Expected of the draft length in use.")
    achieved: float | None = Field(description="Measured over about the last fifty steps.")


class SpeculationStatus(BaseModel):
    """Says how this server speculates now, and why."""

    proposer: Method | None = Field(description="Draft source of requests that do not name one.")
    proposers: list[Source] | None = Field(
        description="Draft sources that requests may name; null until the models are loaded."
    )
    verification: str = Field(description="The setting: how sampled drafts are verified.")
    num_speculative_tokens: int | Literal["auto"] = Field(
        description="The setting: tokens drafted per round."
    )
    on: bool | None = Field(description="Whether the last step drafted; null before the first one.")
    why: str
    draft_length: float | None = Field(
        description="Tokens that a sequence drafts per round now, by the active plan."
    )
    acceptance_rate: float | None = Field(description="Accepted per drafted token since the worker started.")
    acceptance_by_position: list[PositionAcceptance]
    speedup: Speedup
    phase_seconds: dict[str, float] = Field(description="Time since start: draft, score, verify, host.")
    decoded_rows: dict[str, int] = Field(
        description="Rows of rounds since start, by what ran them: c, cuda_graphs, or phases (slower)."
    )
    policy: dict[str, Any] = Field(
        description="What decides the draft length. With `auto`: measured costs of a pass, survival of "
        "drafts by method and temperature, recent lengths, trials of other lengths."
    )
