"""Loads a model that makes vectors or scores: an encoder, or a decoder whose states are taken after the last
norm.

Encoders are read by transformers, described by our layers, and compared with transformers' own states of a
few texts; the fastest kernels are tried first. Decoders are loaded in the way of models that write text.
"""

import logging
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn
from transformers import AutoConfig, AutoModel, AutoModelForSequenceClassification
from transformers.utils import logging as transformers_logging

from truedraft.engine.checkpoints.checkpoint import Checkpoint
from truedraft.engine.checkpoints.facts import ModelFacts
from truedraft.engine.config import AUTO, EngineConfig
from truedraft.engine.embedding.files import (
    LogitScore,
    VectorFiles,
    class_name,
    read_json,
    read_vector_files,
)
from truedraft.engine.embedding.task import CLASSIFIER, gguf_pooling
from truedraft.engine.embedding.text_model import TextModel, kinds_of
from truedraft.engine.embedding.vectors import FUNCTIONS, Dense, Head, Pooling, Scoring, Vectors
from truedraft.engine.errors import ModelLoadError
from truedraft.engine.families.encoders import ENCODERS, describe_encoder, looks_ahead, unknown_part
from truedraft.engine.families.linear import join, weight_of
from truedraft.engine.formats.gguf_file import is_gguf
from truedraft.engine.formats.pretrained_tokenizer import load_pretrained_tokenizer
from truedraft.engine.gguf.encoders import GgufEncoder, holds_encoder, open_encoder
from truedraft.engine.hub.folders import check_path
from truedraft.engine.layers.decoder import Attention
from truedraft.engine.layers.torch_run import TorchRun
from truedraft.engine.messages import EmbeddingFacts, Task, Text
from truedraft.engine.models.agreement import TOLERANCES, same_logits
from truedraft.engine.models.decoder import FusedDecoder
from truedraft.engine.models.fused import Backend, backends, count
from truedraft.engine.models.load import load_gguf, load_known
from truedraft.engine.models.load_errors import stage
from truedraft.engine.models.options import LoadOptions, load_options
from truedraft.engine.models.positions import boundaries
from truedraft.engine.models.sources import find, fused_skeleton
from truedraft.engine.native.native_run import NativeKernels

logger = logging.getLogger(__name__)

# A decoder's texts have at most this many tokens unless max_model_len says more: a pass has whole texts.
DECODER_TOKENS = 8192
# States of texts of these lengths are compared at load; one is this much longer than a window.
PROBE_LENGTHS, BEYOND, LONGEST_PROBE = (48, 9), 24, 600
# Vectors do not depend on these tensors of an encoder.
UNUSED = ("pooler.",)
# A model that scores by the next token is asked this, and answers with one of these tokens.
ASKED = (
    "<|im_start|>system\nJudge whether the Document meets the requirements based on the Query and the "
    'Instruct provided. Note that the answer can only be "yes" or "no".<|im_end|>\n<|im_start|>user\n'
    "<Instruct>: {instruction}\n<Query>: {query}\n<Document>: {document}<|im_end|>\n<|im_start|>assistant\n"
    "<think>\n\n</think>\n\n"
)
ANSWERS = "yes", "no"
INSTRUCTION = "Given a web search query, retrieve relevant passages that answer the query"


@dataclass(frozen=True)
class Loaded:
    """Holds what a worker needs. A text may have at most ``max_tokens`` tokens."""

    task: Task
    model: TextModel
    vectors: Vectors
    facts: EmbeddingFacts
    max_tokens: int
    way: str


def load_vectors(config: EngineConfig, task: Task) -> Loaded:
    """Loads the target for ``task``; raises ``ModelLoadError``."""
    assert config.target is not None
    path, options = config.target, load_options(config)
    if config.draft not in (None, AUTO):
        raise ModelLoadError(f"{path} does not write text, so that no draft helps it: leave out draft")
    if config.lora_modules:
        raise ModelLoadError(f"{path} does not write text and takes no LoRA adapters: leave out lora_modules")
    if options.device_map is not None:
        raise ModelLoadError(
            f"{path} does not write text, and is not spread over devices: leave out device_map"
        )
    if options.cache_dtype not in ("auto", "float32"):
        raise ModelLoadError(
            f"{path} does not write text, and keeps no keys and values after a pass: leave out cache_dtype"
        )
    head: Head | None = None
    if is_gguf(path) and holds_encoder(path):
        files = VectorFiles(pooling=_pooling_of_gguf(path))
        with stage(path, ""):
            stored = open_encoder(path)
        model: TextModel | FusedDecoder
        model, head = _load_encoder(path, stored.config, options, partial(_from_gguf, stored, task, options))
    elif is_gguf(path):
        if task == "rerank":
            raise ModelLoadError(
                f"{path} is a GGUF file of a decoder, which does not rerank here: take the folder of "
                "safetensors"
            )
        files = VectorFiles(pooling=_pooling_of_gguf(path))
        model = load_gguf(path, options, may_pool=True)
    else:
        with stage(path, ""):
            check_path(path, allow_pickle=options.allow_pickle)
        files = read_vector_files(Path(path).expanduser())
        with stage(path, "config.json"):
            described = AutoConfig.from_pretrained(path)
        if looks_ahead(described):
            read = partial(_read_encoder, path, described, task, options)
            model, head = _load_encoder(path, described, options, read)
        else:
            model = _load_decoder(path, options)
            head = _decoder_head(path, model, files) if task == "rerank" else None
    is_decoder = isinstance(model, FusedDecoder)
    template = _pair_template(path) if is_decoder and task == "rerank" else ""
    way = model.way if isinstance(model, FusedDecoder) else f"an encoder's layers in {backend_name(model)}"
    text_model = _of_decoder(path, model) if isinstance(model, FusedDecoder) else model
    vectors = _vectors(path, files, task, head, is_decoder=is_decoder, device=options.device)
    size = vectors.size(text_model.hidden_size)
    facts = EmbeddingFacts(
        size=size,
        prompts=files.prompts or {},
        default_prompt=files.default_prompt,
        dimensions=_dimensions(text_model.facts.config),
        shortens=_shortens(text_model.facts.config, config),
        lower_cases=files.lower_cases,
        pair_template=template,
        instruction=INSTRUCTION if template else "",
    )
    most = _max_tokens(path, config, files, text_model, is_decoder=is_decoder)
    return Loaded(task, text_model, vectors, facts, most, way)


def backend_name(model: TextModel) -> str:
    return "torch" if model.begin is TorchRun else "C"


def _vectors(
    path: str, files: VectorFiles, task: Task, head: Head | None, *, is_decoder: bool, device: torch.device
) -> Vectors:
    if task == "rerank":
        if head is None:
            raise ModelLoadError(
                f"{path} has no classifier, so that it cannot rerank: take it for embeddings"
            )
        return Scoring(head, _activation(path))
    default = "lasttoken" if is_decoder else "mean"
    if not files.pooling:
        logger.warning("%s does not say how it pools: vectors are those of '%s', normalised", path, default)
    dense = tuple(Dense.read(file, device) for file in files.dense)
    return Pooling(files.pooling or (default,), dense, files.normalizes)


def _activation(path: str) -> str:
    """Returns the function that turns a classifier's number into a score, as sentence-transformers keeps
    it."""
    config = {} if is_gguf(path) else read_json(Path(path).expanduser() / "config.json")
    said = (config.get("sentence_transformers") or {}).get("activation_fn")
    name = class_name(said or config.get("sbert_ce_default_activation_function") or "Sigmoid")
    if name not in FUNCTIONS:
        raise ModelLoadError(f"{path} scores by {name}, where {', '.join(FUNCTIONS)} are known")
    return name


def _dimensions(config: Any) -> list[int]:
    return [int(size) for size in getattr(config, "matryoshka_dimensions", None) or ()]


def _shortens(described: Any, config: EngineConfig) -> bool:
    """Tells whether the first numbers of a vector are a vector, too (arXiv 2205.13147)."""
    said = getattr(described, "is_matryoshka", None) or getattr(described, "matryoshka_dimensions", None)
    is_gemma = described.model_type == "gemma3_text" and looks_ahead(described)
    return bool(said or is_gemma or config.matryoshka)


def _max_tokens(
    path: str, config: EngineConfig, files: VectorFiles, model: TextModel, *, is_decoder: bool
) -> int:
    limits = [model.embeddings.longest, getattr(model.facts.config, "max_position_embeddings", None)]
    longest = min(limit for limit in limits if limit)
    if config.max_model_len is not None:
        if config.max_model_len > longest:
            raise ModelLoadError(
                f"max_model_len is {config.max_model_len}, {path} reads only {longest} tokens"
            )
        return config.max_model_len
    said = files.max_tokens or (DECODER_TOKENS if is_decoder else longest)
    return min(int(said), longest)


# The functions below load encoders.


def _load_encoder(
    path: str, described: Any, options: LoadOptions, read: Callable[[Backend], tuple[Any, Head | None]]
) -> tuple[TextModel, Head | None]:
    """``read`` returns transformers' base model with its weights, and the classifier."""
    if (words := unknown_part(described)) is not None:
        raise ModelLoadError(f"{path} cannot be served: {words}")
    if options.quantize != "none":
        raise ModelLoadError(f"{path} is an encoder, which is not quantised: leave out quantize")
    size = described.hidden_size // described.num_attention_heads
    for backend in backends(options, {int(getattr(described, "head_dim", None) or size)}):
        module, head = read(backend)
        model = _describe(module, backend, options)
        if _agrees(model, module, backend):
            return model, head
        logger.warning("%s: the states differ from those of transformers' layers", backend_name(model))
    raise ModelLoadError(f"{path} cannot be served: its states are not those of transformers' model")


def _from_gguf(
    stored: GgufEncoder, task: Task, options: LoadOptions, backend: Backend
) -> tuple[Any, Head | None]:
    head = stored.head(options.device) if task == "rerank" else None
    return stored.module(backend.dtype).requires_grad_(False).to(options.device), head


def _read_encoder(
    path: str, described: Any, task: Task, options: LoadOptions, backend: Backend
) -> tuple[Any, Head | None]:
    is_scored = task == "rerank"
    if is_scored and not _is_classifier(described):
        raise ModelLoadError(
            f"{path} has no classifier of one score, so that it cannot rerank: take it for embeddings"
        )
    made_by = AutoModelForSequenceClassification if is_scored else AutoModel
    level = transformers_logging.get_verbosity()
    transformers_logging.set_verbosity_error()  # The check below reports what is missing.
    try:
        with stage(path, "weights"):
            module, found = made_by.from_pretrained(
                path,
                config=described,
                dtype=backend.dtype,
                attn_implementation="eager",
                output_loading_info=True,
                use_safetensors=None if options.allow_pickle else True,
            )
    finally:
        transformers_logging.set_verbosity(level)
    missing = sorted(name for name in found["missing_keys"] if is_scored or not name.startswith(UNUSED))
    if missing or found["mismatched_keys"]:
        raise ModelLoadError(
            f"{path} lacks weights of the model: {', '.join(missing[:3]) or 'others have its names'}"
        )
    module = module.eval().requires_grad_(False).to(options.device)
    make_head = ENCODERS[described.model_type].head if is_scored else None
    if is_scored and make_head is None:
        raise ModelLoadError(
            f"{path} cannot rerank: classifiers of {described.model_type} are not known here"
        )
    base = getattr(module, module.base_model_prefix) if is_scored else module
    head = None if make_head is None else _in_float32(make_head(module), module, base)
    return base, head


def _in_float32(head: Head, module: Any, base: Any) -> Head:
    """Lets a classifier's own layers compute in float32, whatever the encoder is computed in."""
    for name, child in module.named_children():
        if child is not base and name != module.base_model_prefix:
            child.float()
    if (pooler := getattr(base, "pooler", None)) is not None:
        pooler.float()
    return head


def _is_classifier(described: Any) -> bool:
    architecture = str((getattr(described, "architectures", None) or [""])[0])
    family = ENCODERS.get(described.model_type)
    return (
        architecture.endswith(CLASSIFIER)
        and described.num_labels == 1
        and family is not None
        and family.head is not None
    )


def _describe(module: Any, backend: Backend, options: LoadOptions) -> TextModel:
    config = module.config
    facts = ModelFacts(config, None, count(module), backend.dtype, options.device, backend.bf16_linears)
    make = partial(join, linears=backend.linears)

    def words_of(table: nn.Embedding) -> Any:
        return backend.linears.embeddings(weight_of(table))

    parts = describe_encoder(module, facts, make, words_of)
    begin = TorchRun if backend.library is None else NativeKernels(backend.library)
    return TextModel(facts, parts.embeddings, parts.layers, parts.norm, parts.rotary, begin)


@torch.inference_mode()
def _agrees(model: TextModel, module: Any, backend: Backend) -> bool:
    """Tells whether the states of a few texts are those of transformers' ``module``, each text by itself."""
    config, longest = module.config, model.embeddings.longest or module.config.max_position_embeddings
    lengths = [*PROBE_LENGTHS, *(bound + BEYOND for bound in boundaries(config) if bound < LONGEST_PROBE)]
    if (window := getattr(config, "sliding_window", None)) and window < LONGEST_PROBE:
        lengths.append(2 * window + BEYOND)
    first = 5  # special tokens come first in most vocabularies
    texts = [
        Text(
            [first + (7 * i * i + 3 * i + 11 * number) % (config.vocab_size - first) for i in range(length)],
            length // 2 if number == 1 and getattr(config, "type_vocab_size", 0) > 1 else None,
        )
        for number, length in enumerate(min(length, longest) for length in lengths)
    ]
    tolerance = TOLERANCES[torch.bfloat16 if backend.bf16_linears else backend.dtype]
    for text, ours in zip(texts, model.states(texts), strict=True):
        ids = torch.tensor([text.token_ids], device=ours.device)
        kinds = (
            {"token_type_ids": torch.tensor([kinds_of(text)], device=ours.device)} if text.second_from else {}
        )
        theirs = module(input_ids=ids, **kinds).last_hidden_state[0].float()
        if not same_logits(ours, theirs, tolerance):
            return False
    return True


# The functions below load decoders.


class BareCheckpoint(Checkpoint):
    """Gives the tensors of a base model, which was saved without an output layer, the names of a whole
    model's."""

    def __init__(self, source: Checkpoint) -> None:
        super().__init__({f"model.{name}": file for name, file in source.files.items()})
        self.source = source

    def read(self, names: Any) -> dict[str, torch.Tensor]:
        found = self.source.read([name.removeprefix("model.") for name in names])
        return {f"model.{name}": tensor for name, tensor in found.items()}

    def shapes(self, names: Any) -> dict[str, tuple[int, ...]]:
        found = self.source.shapes([name.removeprefix("model.") for name in names])
        return {f"model.{name}": shape for name, shape in found.items()}


def _load_decoder(path: str, options: LoadOptions) -> FusedDecoder:
    found = find(path, options)
    checkpoint = Checkpoint.find(found.path, options.allow_pickle)
    if checkpoint is not None:
        checkpoint.files.pop("score.weight", None)
        if not any(name.startswith("model.") for name in checkpoint.files):
            checkpoint = BareCheckpoint(checkpoint)
        if "lm_head.weight" not in checkpoint.files:
            found.config.tie_word_embeddings = True  # The model writes no text, so any output layer will do.
        found = replace(found, own_checkpoint=checkpoint)
    with stage(path, "building the model"):
        skeleton = fused_skeleton(found, options.dtype)
        model = None if skeleton is None else load_known(found, skeleton, options)
    if model is None:
        raise ModelLoadError(
            f"{path} makes no vectors here: that needs an encoder of a known family, or a decoder of a fused "
            "one (docs/embeddings.md)"
        )
    return model


def _of_decoder(path: str, model: FusedDecoder) -> TextModel:
    weights = model.weights
    mixers = [layer.mixer for layer in weights.layers]
    is_plain = weights.joint is None and weights.layer_inputs is None
    if not is_plain or not all(isinstance(each, Attention) and each.shape.source is None for each in mixers):
        raise ModelLoadError(
            f"{path} makes no vectors here: its layers keep more than keys and values of a token"
        )
    return TextModel.of_decoder(model.facts, weights, model.begin)


def _decoder_head(path: str, model: FusedDecoder, files: VectorFiles) -> Head:
    checkpoint = Checkpoint.find(str(Path(path).expanduser()), allow_pickle=False)
    if checkpoint is not None and "score.weight" in checkpoint.files:
        weight = checkpoint.read(["score.weight"])["score.weight"].float().to(model.device)
        if weight.shape[0] != 1:
            raise ModelLoadError(f"{path} has {weight.shape[0]} classes, so that it cannot rerank")
        return lambda states: (states[-1:] @ weight.T)[0]
    tied = checkpoint is None or "lm_head.weight" in checkpoint.files or _says_tied(path)
    make = model.weights.make_output
    if not tied or make is None:
        raise ModelLoadError(f"{path} has no output layer, so that it cannot rerank")
    tokens = files.logit_score or _answers(path)
    rows = [tokens.true_token] + ([] if tokens.false_token is None else [tokens.false_token])
    output = make(np.array(rows, dtype=np.int64), False)
    assert output is not None

    def score(states: torch.Tensor) -> torch.Tensor:
        logits = output(states[-1:].to(model.dtype)).float()[0]
        return logits[:1] if len(rows) == 1 else logits[:1] - logits[1:]

    return score


def _says_tied(path: str) -> bool:
    return bool(AutoConfig.from_pretrained(path).tie_word_embeddings)


def _answers(path: str) -> LogitScore:
    """Returns the tokens with which the model answers yes or no."""
    tokenizer = load_pretrained_tokenizer(path)
    found = [tokenizer.encode(word, add_special_tokens=False) for word in ANSWERS]
    if any(len(ids) != 1 for ids in found):
        raise ModelLoadError(f"{path} has no tokens 'yes' and 'no', so that it cannot rerank")
    return LogitScore(found[0][0], found[1][0])


def _pair_template(path: str) -> str:
    """Returns the text that asks a decoder about a pair; raises ``ModelLoadError`` where it is not known."""
    kind = read_json(Path(path).expanduser() / "config.json").get("model_type")
    if kind != "qwen3":
        raise ModelLoadError(
            f"{path} cannot rerank: how {kind} models are asked for a score is not known here"
        )
    return ASKED


def _pooling_of_gguf(path: str) -> tuple[str, ...]:
    pooling = gguf_pooling(path)
    return () if pooling in (None, "rank") else (str(pooling),)
