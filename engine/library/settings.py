"""The keyword arguments of ``LLM`` and their types, for editors and type checkers.

Written from ``EngineConfig`` by ``python -m tools.write_configuration``; a test compares the two.
"""

from os import PathLike
from typing import Literal, TypedDict


class LLMSettings(TypedDict, total=False):
    """Settings of ``truedraft serve`` that concern models, speculation, batching and caches.

    Each is explained in docs/configuration.md.
    """

    task: Literal["auto", "generate", "embed", "rerank"]
    matryoshka: bool
    device: str
    tensor_parallel_size: int
    dtype: Literal["auto", "float32", "bfloat16", "float16"]
    device_map: Literal["auto", "balanced", "balanced_low_0", "sequential"] | None
    trust_remote_code: bool
    allow_pickle: bool
    generation_config: Literal["auto", "none"]
    self_check: bool
    num_threads: int
    native_kernels: bool
    quantize: Literal["none", "int8", "int4", "fp8"]
    cuda_graphs: bool
    cuda_graph_seconds: float
    max_model_len: int | None
    method: Literal["auto", "draft_model", "eagle", "mtp", "ngram", "none"]
    ngram_min_match: int
    ngram_max_tokens: int
    ngram_choice: Literal["most_recent", "most_frequent"]
    ngram_pool_tokens: int | None
    num_speculative_tokens: int | Literal["auto"]
    draft_vocab_size: int | Literal["auto", "full"]
    draft_vocab_file: str | None
    draft_sample_method: Literal["auto", "greedy", "probabilistic"]
    verification: Literal["auto", "rejection", "block", "coupled"]
    lora_modules: list[str]
    allow_lora_updating: bool
    max_loras: int
    max_lora_rank: int
    max_images: int
    max_image_tokens: int
    max_num_sequences: int | None
    max_num_batched_tokens: int
    step_seconds: float
    prompt_seconds: float
    stream_interval: float
    block_size: int
    prefix_caching: bool
    prefix_cache_dir: str | PathLike[str] | None
    prefix_cache_disk: int | str
    kv_events_endpoint: str | None
    kv_events_topic: str
    cache_dtype: Literal["auto", "float32", "float16", "int8"]
    draft_cache_dtype: Literal["auto", "float32", "float16", "int8"]
    cache_memory: int | str | None
    cache_memory_share: float | None
