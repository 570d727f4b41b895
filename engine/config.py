"""Declares the settings of the engine: models, device, speculation, cache, scheduling.

Both processes import this module, so it does not import torch. ``server.settings.Settings`` inherits these
fields and adds those of HTTP. Each class is a group of settings: the first line of its docstring is the
group's title, and the descriptions become ``--help`` and ``docs/configuration.md``.
"""

import re
from collections import Counter
from pathlib import Path
from typing import Annotated, Literal, Self

from pydantic import BaseModel, BeforeValidator, ByteSize, ConfigDict, Field, model_validator
from pydantic_settings import NoDecode

from truedraft.engine.messages import DefaultMethod

BUNDLED_PAIR = Path(__file__).parent / "demo_pair"
# This value leaves the choice of a draft to the engine.
AUTO = "auto"
# Tokens of finished answers that are kept for each salt, unless the settings say otherwise.
DEFAULT_POOL_TOKENS = 32_768
# These drafts are the target's own weights in fewer bits; each has its way of quantising.
SELF_DRAFTS = {"self:int4": "int4", "self:int8": "int8"}


class ModelSettings(BaseModel):
    """Models and device"""

    target: str | None = Field(
        None,
        description="Target model: a folder, a GGUF file, or a name of the hub such as "
        "owner/repository:Q4_K_M. Default: the bundled demo pair.",
    )
    draft: str | None = Field(
        AUTO,
        description="Draft model: a folder or hub id of a model or of an EAGLE-3 head, 'mtp' (the head in "
        "the target's own checkpoint) or a file or folder of such a head, 'self:int4' or 'self:int8' "
        "(the target's own weights in 4 or 8 bits), 'auto' (the fastest of such a head, and of heads and "
        "smaller models of the same family that lie next to the target, by passes measured at start; "
        "none where nothing pays; the bundled draft with the bundled target), or 'none'.",
    )
    task: Literal["auto", "generate", "embed", "rerank"] = Field(
        "auto",
        description="What the target is for: to write text, to make vectors of texts (/v1/embeddings), or to "
        "score documents for a query (/v1/rerank). auto: as its files say, and else to write text.",
    )
    matryoshka: bool = Field(
        False,
        description="The first numbers of the target's vectors are vectors, too, so that requests may name "
        "dimensions. Only where its makers say so: most models' files do not.",
    )
    device: str = Field(
        "auto",
        description="auto, cpu, cuda or cuda:N. auto takes a GPU if there is one. A server may have several, "
        "such as cuda:0,1: a worker on each.",
    )
    tensor_parallel_size: int = Field(
        1,
        ge=1,
        le=64,
        description="Processes on this machine, ranks, that compute the target together, each with a share "
        "of its layers and caches: a worker then consists of so many. num_threads and the memory for caches "
        "are divided among them. -tp for short. On GPUs, one for each rank, this has never run.",
    )
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = Field(
        "auto",
        description="Number type of weights and activations. auto: bfloat16 on a GPU, or float16 on one "
        "below compute capability 8.0, which has no bfloat16; float32 on a CPU, with the weights of a 16-bit "
        "checkpoint kept in 16 bits, which loses nothing. bfloat16 on a CPU with AVX512-BF16: only matrix "
        "multiplications of fused models use it; sums and everything else stay float32.",
    )
    device_map: Literal["auto", "balanced", "balanced_low_0", "sequential"] | None = Field(
        None,
        description="Spread each model over all GPUs with accelerate, using one of its strategies. "
        "Default: all on one device.",
    )
    trust_remote_code: bool = Field(
        False, description="Run the model code that a checkpoint brings along. Read it first."
    )
    allow_pickle: bool = Field(
        False,
        description="Load weights from pytorch_model.bin, a pickle, where a checkpoint has no safetensors.",
    )
    generation_config: Literal["auto", "none"] = Field(
        "auto",
        description="auto: requests that name no sampling parameters get those that the target's "
        "generation_config.json recommends. none: they do not.",
    )
    self_check: bool = Field(
        True,
        description="At load, compare a few tokens computed with our cache with the model's own "
        "attention, and refuse a model that deviates.",
    )
    num_threads: int = Field(
        0,
        ge=0,
        description="CPU threads of the worker. 0: as many as torch chooses, but no more than the fast "
        "cores that the process may use (affinity mask and control groups; fewer than four count each "
        "processor).",
    )
    native_kernels: bool = Field(
        True,
        description="On a CPU, run linear layers, passes of fused models (most families), drafting and "
        "sampling in C, compiled once where a C compiler is installed. They are compared "
        "with torch's operations at load and left out if they differ.",
    )
    quantize: Literal["none", "int8", "int4", "fp8"] = Field(
        "none",
        description="Quantise the weights of fused models, target and draft, at load: to 8 or 4 "
        "bits in groups of 32 (embeddings and output layer to 8), on a CPU with the inputs "
        "of layers in 8 bits; fp8 (a GPU of compute capability 8.9): layers in 8-bit floating "
        "point, weights and inputs. The target then differs from the checkpoint. "
        "Quantised weights of GGUF files that have no more bits stay as they are.",
    )
    cuda_graphs: bool = Field(
        True,
        description="On a GPU, capture drafting, scoring and verification as CUDA graphs, for fused "
        "models. They are compared with the usual passes at load and left out if "
        "they differ.",
    )
    cuda_graph_seconds: float = Field(
        30,
        ge=0,
        description="Seconds that capturing may take at start, for both models together. Batches of "
        "shapes that were not captured run without graphs.",
    )
    max_model_len: int | None = Field(
        None,
        ge=2,
        description="Largest number of tokens of prompt and output together. Default: the target's "
        "context. For an encoder-decoder model it limits the prompt and the output "
        "separately; for a model with longrope it also decides which rotary factors serve"
        " all texts.",
    )


class SpeculationSettings(BaseModel):
    """Speculation"""

    method: DefaultMethod = Field(
        "auto",
        description="Who drafts. eagle, mtp: the head that draft names. ngram: the text so far, without a "
        "model. auto: in each round the draft model or head, or ngram, whichever is expected to give more "
        "tokens per second; "
        "without a draft model, ngram where it pays if num_speculative_tokens is auto, "
        "else none. A request's 'prediction' is drafted from regardless of this setting.",
    )
    ngram_min_match: int = Field(
        2,
        ge=1,
        description="Number of last tokens that must have occurred before for ngram to draft what "
        "followed them.",
    )
    ngram_max_tokens: int = Field(
        32,
        ge=1,
        le=32,
        description="Largest number of tokens that ngram drafts in a round, if the draft length allows more.",
    )
    ngram_choice: Literal["most_recent", "most_frequent"] = Field(
        "most_recent",
        description="What ngram drafts if the text has continued in several ways: the latest "
        "continuation, or the most frequent one.",
    )
    ngram_pool_tokens: int | None = Field(
        None,
        ge=0,
        le=1 << 24,
        description="Last tokens of finished answers that ngram also looks in. Each API key has its own, and "
        "so has each cache_salt; the 16 used last are kept, in about 40 bytes a token. 0: none. Default: "
        "32768 with prefix_caching, else 0.",
    )
    num_speculative_tokens: Annotated[int, Field(ge=0, le=32)] | Literal["auto"] = Field(
        "auto",
        description="Tokens drafted per round; 0 switches speculation off. auto: as many as maximise "
        "tokens per second, by costs that are measured at start and tracked from then on.",
    )
    draft_vocab_size: Annotated[int, Field(ge=1)] | Literal["auto", "full"] = Field(
        "auto",
        description="How many tokens a head that shares the target's output layer can draft: that number of "
        "the most frequent ones, or full: all, with that layer as it is. auto: what makes most tokens a "
        "second, by passes measured at start: on a CPU perhaps with a copy of the layer in 4 bits, and with "
        "draft_vocab_file perhaps fewer tokens than all. The output has the same distribution in any case.",
    )
    draft_vocab_file: str | None = Field(
        None,
        description="File of texts like those that will be served, one a line, or in a .jsonl file objects "
        "with 'prompt' or 'messages': the tokens that a head drafts are ranked by how often they are in it. "
        "Default: by their ids, the first of which tokenizers have learned first.",
    )
    draft_sample_method: Literal["auto", "greedy", "probabilistic"] = Field(
        "auto",
        description="How the draft model draws its tokens: the most likely one, or at random with the "
        "request's parameters. auto: as the target does. The output has the same distribution in any case.",
    )
    verification: Literal["auto", "rejection", "block", "coupled"] = Field(
        "auto",
        description="How drafted tokens are verified when sampling. "
        "auto: coupled for requests with a seed, else rejection.",
    )


def _split_entries(value: object) -> object:
    """Lets several entries be one text, and each of a list be several."""
    parts = [value] if isinstance(value, str) else value
    if not isinstance(parts, list) or not all(isinstance(part, str) for part in parts):
        return value
    return [entry.strip() for part in parts for entry in part.split(",") if entry.strip()]


class AdapterSettings(BaseModel):
    """LoRA adapters"""

    lora_modules: Annotated[list[str], NoDecode, BeforeValidator(_split_entries)] = Field(
        [],
        description="LoRA adapters of the target, as name=path, comma-separated; several may also follow the "
        "flag. A path is a folder with PEFT's files. Requests choose one by 'model'.",
    )
    allow_lora_updating: bool = Field(
        False,
        description="Let keys that may operate load and unload LoRA adapters: /v1/load_lora_adapter reads "
        "any folder that the server can read.",
    )
    max_loras: int = Field(
        8, ge=1, description="Largest number of LoRA adapters that are loaded at the same time."
    )
    max_lora_rank: int = Field(64, ge=1, description="Largest rank of a LoRA adapter.")

    @property
    def takes_adapters(self) -> bool:
        return bool(self.lora_modules) or self.allow_lora_updating

    @model_validator(mode="after")
    def _check_adapters(self) -> Self:
        names = [adapter_entry(entry)[0] for entry in self.lora_modules]
        if twice := [name for name, number in Counter(names).items() if number > 1]:
            raise ValueError(f"lora_modules has two adapters of the name {twice[0]}")
        if len(names) > self.max_loras:
            raise ValueError(f"lora_modules has {len(names)} adapters, and max_loras is {self.max_loras}")
        return self


class PictureSettings(BaseModel):
    """Pictures"""

    max_images: int = Field(
        8,
        ge=0,
        description="Largest number of pictures in a request to a model that sees. 0: its vision tower is "
        "not loaded, and pictures are refused.",
    )
    max_image_tokens: int = Field(
        2048,
        ge=1,
        description="Largest number of tokens of a picture. Larger ones are scaled down, as they are to the "
        "size that the model's preprocessor_config.json names.",
    )


def adapter_entry(entry: str) -> tuple[str, str]:
    """Returns the name and the path of an entry of ``lora_modules``."""
    name, equals, path = entry.partition("=")
    if not equals or not path.strip():
        raise ValueError(f"lora_modules has {entry!r}, where name=path is needed")
    check_adapter_name(name.strip())
    return name.strip(), path.strip()


def check_adapter_name(name: str) -> None:
    """Raises ``ValueError`` for a name that requests could not use."""
    if not re.fullmatch(r"[\w.\-/@+]{1,200}", name):
        raise ValueError(
            f"{name!r} is no name of a LoRA adapter: letters, digits and . _ - / @ + are, up to 200"
        )


class BatchingSettings(BaseModel):
    """Batching and caches"""

    max_num_sequences: int | None = Field(
        None,
        ge=1,
        description="Largest number of sequences that run at the same time. Default: 128 on a GPU, 32 on "
        "a CPU.",
    )
    max_num_batched_tokens: int = Field(
        1024,
        ge=1,
        description="Tokens scored per step; longer prompts are computed in chunks, except by encoders.",
    )
    step_seconds: float = Field(
        0.02,
        ge=0,
        description="Seconds of a step that several short rounds share on a CPU, if each takes less "
        "than half of them and nothing can change in between: small models then spend "
        "less time around their passes. 0: every round is a step.",
    )
    prompt_seconds: float = Field(
        0.2,
        ge=0,
        description="Seconds that prompts should take of a step at most. Where they take longer, less of a "
        "long prompt is computed in a step, so that other requests' tokens are not late; 16 tokens in any "
        "case, and as long as decoding takes itself. 0: as much as max_num_batched_tokens allows.",
    )
    stream_interval: float = Field(
        0.01,
        ge=0,
        description="Seconds during which the tokens of several short steps are collected and then sent "
        "together; with more than 66 streams 0.15 ms for each, up to 0.05, as a front end could not follow "
        "otherwise. A sequence's first token and its end never wait, and a step that takes longer than this "
        "is sent at once; 0 sends every step.",
    )
    block_size: int = Field(16, ge=1, description="Tokens per cache block.")
    prefix_caching: bool = Field(
        True, description="Reuse what earlier requests with the same beginning have computed."
    )
    prefix_cache_dir: Path | None = Field(
        None,
        description="Folder in which a worker on a CPU also keeps what prefix_caching reuses: it is found "
        "again after a restart, and when the cache had no more room for it. Servers may share a folder. From "
        "its files, which only their owner may read, texts can be told. Default: none.",
    )
    prefix_cache_disk: ByteSize = Field(
        ByteSize(10 << 30),
        gt=0,
        description="Bytes that the files of prefix_cache_dir may take, such as '10GiB'. The oldest give "
        "way.",
    )
    kv_events_endpoint: str | None = Field(
        None,
        description="ZeroMQ address at which gateways hear which tokens the target's cache holds, in vLLM's "
        "form, such as tcp://*:5557. It has the tokens of all prompts without a cache_salt and asks for no "
        "key. Needs the extra 'kv-events'.",
    )
    kv_events_topic: str = Field("", description="First frame of those messages, by which gateways choose.")
    cache_dtype: Literal["auto", "float32", "float16", "int8"] = Field(
        "auto",
        description="What keys and values are kept in on a CPU. auto: float32 with dtype float32; else "
        "float16 where all linear layers of a fused model have weights of 16 bits or fewer, and the model's "
        "own type otherwise, as on a GPU. int8: 8 bits, with a scale for each token and head.",
    )
    draft_cache_dtype: Literal["auto", "float32", "float16", "int8"] = Field(
        "auto",
        description="What keys and values of the draft model or head are kept in on a CPU. auto: as "
        "cache_dtype says.",
    )
    cache_memory: ByteSize | None = Field(
        None, description="Memory for both KV caches together, such as '2GiB'. Default: cache_memory_share."
    )
    cache_memory_share: float | None = Field(
        None,
        gt=0,
        lt=1,
        description="Share for both KV caches: on a GPU of the memory that is free once the models are "
        "loaded; on a CPU of the machine's memory, or its container's, less what the worker has taken by "
        "then. Never more than max_num_sequences of full length can use. Default: 0.9 on a GPU, 0.25 on a "
        "CPU.",
    )


def _expanded(model: str) -> str:
    """Expands ``~``, which a shell does for flags, but neither in YAML files nor in ``--target=~/model``."""
    return str(Path(model).expanduser()) if model.startswith("~") else model


class EngineConfig(BatchingSettings, PictureSettings, AdapterSettings, SpeculationSettings, ModelSettings):
    """Holds the settings of one worker. ``target`` None means the bundled pair."""

    model_config = ConfigDict(extra="forbid")

    def num_sequences_on(self, device_type: str) -> int:
        """Returns ``max_num_sequences``, or its default for a device of this kind."""
        return self.max_num_sequences or (32 if device_type == "cpu" else 128)

    @property
    def num_pool_tokens(self) -> int:
        """Returns ``ngram_pool_tokens``, or its default: nothing is shared where beginnings are not."""
        if self.ngram_pool_tokens is None:
            return DEFAULT_POOL_TOKENS if self.prefix_caching else 0
        return self.ngram_pool_tokens

    @model_validator(mode="after")
    def _resolve_models(self) -> Self:
        if self.target is None:
            self.target = str(BUNDLED_PAIR / "target")
            if self.draft in (None, AUTO):
                self.draft = str(BUNDLED_PAIR / "draft")
        if self.draft == "none":
            self.draft = None
        if self.kv_events_endpoint is not None and not self.prefix_caching:
            raise ValueError("kv_events_endpoint tells of what prefix_caching keeps; switch that on")
        if self.draft is not None and self.draft.startswith("self:") and self.draft not in SELF_DRAFTS:
            raise ValueError(
                f"draft is {self.draft}; the target's own weights are {' or '.join(SELF_DRAFTS)}"
            )
        if self.prefix_cache_dir is not None and not self.prefix_caching:
            raise ValueError("prefix_cache_dir keeps what prefix_caching reuses: set both, or neither")
        if self.ngram_pool_tokens and not self.prefix_caching:
            raise ValueError(
                "ngram_pool_tokens keeps texts for later requests, as prefix_caching keeps what it computed: "
                "switch that on, or leave this out"
            )
        self.target = _expanded(self.target)
        self.draft = None if self.draft is None else _expanded(self.draft)
        return self
