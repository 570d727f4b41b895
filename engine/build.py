"""The one place where configuration becomes concrete objects."""

from collections.abc import Callable
from functools import partial

import torch
from pydantic import ByteSize

from truedraft.engine.config import EngineConfig
from truedraft.engine.core.admission import Admission, EncoderDecoderLimits
from truedraft.engine.core.block_pool import BlockPool
from truedraft.engine.core.engine import EngineCore
from truedraft.engine.core.planning import AUTO_LIMITS, Lookup
from truedraft.engine.core.runner import Runner
from truedraft.engine.core.scheduler import Scheduler
from truedraft.engine.errors import ModelLoadError
from truedraft.engine.memory.cache_memory import cache_budget
from truedraft.engine.messages import Method
from truedraft.engine.models.base import Model
from truedraft.engine.models.hf.encoder_decoder import EncoderDecoderModel
from truedraft.engine.models.loader import draft_source, load_model, load_options
from truedraft.engine.models.model_runner import ModelRunner
from truedraft.engine.native.backend import NativeBackend, native_backend
from truedraft.engine.native.decoder import NativeDecoder
from truedraft.engine.native.threads import set_num_threads, usual_num_threads
from truedraft.engine.proposers.base import Proposer
from truedraft.engine.proposers.draft_model import DraftModelProposer
from truedraft.engine.proposers.grammar import GrammarProposer
from truedraft.engine.proposers.ngram import NgramProposer
from truedraft.engine.proposers.prediction import PredictionProposer
from truedraft.engine.proposers.translated.pairing import Pairing, pair_models
from truedraft.engine.proposers.translated.proposer import TranslatedDraftProposer
from truedraft.engine.runtime.calibrate import calibrate
from truedraft.engine.runtime.cuda.plan import GraphPlan, plan_graphs
from truedraft.engine.runtime.cuda.runner import CudaRunner
from truedraft.engine.runtime.native.runner import NativeRunner
from truedraft.engine.runtime.phases import PhaseRunner
from truedraft.engine.sampling.backend import SamplingBackend, TorchBackend
from truedraft.engine.sampling.grammar import Grammars
from truedraft.engine.sampling.grammar_tokenizer import load_tokenizer
from truedraft.engine.speculation.costs import Costs
from truedraft.engine.speculation.planner import SpeculationPlanner

# The operations of smaller models are so short that torch's other threads mostly wait. The native kernels
# themselves wake only threads that pay.
MIN_PARAMETERS_FOR_TORCH_THREADS = 50_000_000


def build_engine(config: EngineConfig, begin: Callable[[str], None] = lambda stage: None) -> EngineCore:
    """Load the models, allocate the caches, wire the engine. ``ModelLoadError`` if that cannot be.

    ``begin`` hears the name of each stage that takes long.
    """
    options = load_options(config)
    device = options.device
    if device.type == "cuda":
        if device.index is not None:
            torch.cuda.set_device(device)  # pinned memory, events and Triton take the current one
        # Sums of few rows and of many are then rounded alike, but for their order.
        torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = False
        # cuDNN prepares an attention kernel for every new length of a prompt, which takes tenths of a second.
        torch.backends.cuda.enable_cudnn_sdp(False)
    assert config.target is not None  # filled in by EngineConfig
    begin("the target model")
    target = load_model(config.target, options)
    num_threads = config.num_threads or _num_threads(target)
    if config.native_kernels and device.type == "cpu":
        set_num_threads(num_threads)
    else:
        torch.set_num_threads(num_threads)
    draft = pairing = None
    if config.draft is not None and config.num_speculative_tokens != 0 and config.method != "none":
        begin("the draft model")
        source, draft_options = draft_source(config)
        draft = load_model(source, draft_options)
        _check_kinds(target, draft)
        pairing = pair_models(config.target, source, target.vocab_size, draft.vocab_size)

    encoder_decoder = None
    if isinstance(target, EncoderDecoderModel):
        encoder_decoder = _encoder_decoder_limits(config, target, draft)
        max_model_len = (
            encoder_decoder.max_prompt_len + len(target.start_ids) + encoder_decoder.max_output_len
        )
    else:
        max_model_len = _max_model_len(config, target)
    begin("caches and costs")
    planned = plan_graphs(config, target, draft, max_model_len)
    models = [target] if draft is None else [target, draft]
    num_blocks = _num_blocks(config, models, max_model_len, planned)
    # The last block is no pool's: graphs store their padding there.
    cached_blocks = num_blocks + (planned is not None)
    runners = [ModelRunner.build(model, cached_blocks, config.block_size) for model in models]
    target_runner, draft_runner = runners[0], runners[1] if len(runners) > 1 else None
    graphs = None
    if planned is not None:
        target_runner, draft_runner, graphs = planned.carry_out(target_runner, draft_runner, num_blocks)
    draft_pool = None if draft is None else BlockPool(num_blocks, config.block_size)
    target_pool = BlockPool(num_blocks, config.block_size)
    max_draft_len = max_model_len
    if draft is not None and encoder_decoder is None:
        max_draft_len = min(max_model_len, draft.max_position or max_model_len)
    proposer = _proposer(config, target, draft_runner, draft_pool, pairing, max_draft_len)
    lookups: list[Lookup] = [
        GrammarProposer(),
        PredictionProposer(),
        NgramProposer(config.ngram_min_match, config.ngram_max_tokens, config.ngram_choice),
    ]
    is_auto = config.num_speculative_tokens == "auto"
    native = target_runner.fast_pass if isinstance(target_runner.fast_pass, NativeDecoder) else None
    step_seconds = config.step_seconds if native is not None else 0.0
    if is_auto:
        max_tokens = config.max_num_sequences * (max(AUTO_LIMITS.values()) + 1)
        costs = calibrate(target_runner, target_pool, draft_runner, draft_pool, max_tokens, step_seconds)
    else:
        costs = Costs.uncalibrated(step_seconds)
    planner = SpeculationPlanner(
        costs,
        lookups,
        max_draft_len,
        tracks_draft_cache=pairing is None or pairing.translators is None,
    )
    phases = PhaseRunner(target_runner, proposer, _sampling_backend(config, device))
    runner: Runner = phases
    if native is not None:
        runner = _native_runner(config, native, phases, max_draft_len)
    elif graphs is not None and (proposer is None or isinstance(proposer, DraftModelProposer)):
        runner = CudaRunner(graphs, phases)
    return EngineCore(
        target=target_runner,
        draft=draft_runner,
        runner=runner,
        scheduler=Scheduler(
            target_pool=target_pool,
            # A draft with another tokenizer counts in its own tokens, and keeps its own tables.
            draft_pool=None if pairing is None or pairing.translators else draft_pool,
            max_num_sequences=config.max_num_sequences,
            max_num_batched_tokens=config.max_num_batched_tokens,
            planner=planner,
            # What an encoder makes of a beginning depends on what follows.
            prefix_caching=config.prefix_caching and encoder_decoder is None,
        ),
        admission=Admission(
            vocab_size=target.vocab_size,
            max_model_len=max_model_len,
            eos_token_ids=target.eos_token_ids,
            methods=frozenset([lookup.name for lookup in lookups] + ([proposer.name] if proposer else [])),
            method=_method(config, draft),
            num_speculative_tokens=None if is_auto else int(config.num_speculative_tokens),
            verification=None if config.verification == "auto" else config.verification,
            encoder_decoder=encoder_decoder,
            has_rules=bool(target.rules),
            grammars=Grammars(
                partial(load_tokenizer, config.target, target.vocab_size, target.eos_token_ids)
            ),
        ),
    )


def _native_runner(
    config: EngineConfig, target: NativeDecoder, phases: PhaseRunner, max_draft_len: int
) -> NativeRunner:
    draft, proposer = None, phases.proposer
    if isinstance(proposer, DraftModelProposer) and isinstance(proposer.model.fast_pass, NativeDecoder):
        draft = proposer.model.fast_pass
    can_sample = isinstance(phases.backend, NativeBackend)
    return NativeRunner(target, draft, proposer, phases, can_sample, config.step_seconds, max_draft_len)


def _proposer(
    config: EngineConfig,
    target: Model,
    draft: ModelRunner | None,
    draft_pool: BlockPool | None,
    pairing: Pairing | None,
    max_draft_len: int,
) -> Proposer | None:
    """Who drafts with the draft model."""
    if draft is None or draft_pool is None or pairing is None:
        return None
    if pairing.translators is None:
        return DraftModelProposer(draft, max_draft_len, target.vocab_size)
    if isinstance(target, EncoderDecoderModel):
        raise ModelLoadError("the draft of an encoder-decoder target must share its tokenizer")
    return _translated(config, target, draft, draft_pool, pairing)


def _sampling_backend(config: EngineConfig, device: torch.device) -> SamplingBackend:
    """Returns what draws in every step."""
    native = native_backend() if config.native_kernels and device.type == "cpu" else None
    return native or TorchBackend()


def _num_threads(target: Model) -> int:
    """Threads for the CPU's share of the work by default."""
    few = target.num_parameters < MIN_PARAMETERS_FOR_TORCH_THREADS
    return 1 if few and not target.is_native else usual_num_threads()


def _method(config: EngineConfig, draft: Model | None) -> Method:
    if config.method == "auto" and draft is None and config.num_speculative_tokens != "auto":
        return "none"  # n-grams alone can cost more than they give; a fixed length could not be helped
    if config.method == "draft_model" and draft is None:
        raise ModelLoadError("method is draft_model, but no draft model is given")
    return config.method


def _max_model_len(config: EngineConfig, target: Model) -> int:
    context = target.max_position
    if config.max_model_len is None:
        if context is None:
            raise ModelLoadError("the target does not say how long its context is; set max_model_len")
        return context
    if context is not None and config.max_model_len > context:
        raise ModelLoadError(f"max_model_len is {config.max_model_len}, the target's context only {context}")
    return config.max_model_len


def _encoder_decoder_limits(
    config: EngineConfig, target: EncoderDecoderModel, draft: Model | None
) -> EncoderDecoderLimits:
    """``max_model_len`` bounds prompt and output, each; with relative positions any length is possible."""
    context = config.max_model_len or target.max_position or target.usual_length
    if context is None:
        raise ModelLoadError(
            "the target does not say how long prompts and outputs may be; set max_model_len, for each"
        )
    for name, model in (("target", target), ("draft", draft)):
        if model is not None and model.max_position is not None and context > model.max_position:
            raise ModelLoadError(
                f"prompt and output may have {context} tokens each (max_model_len), "
                f"the {name} reads and writes only {model.max_position}"
            )
    return EncoderDecoderLimits(
        start_ids=tuple(target.start_ids),
        max_prompt_len=context,
        max_output_len=context - len(target.start_ids),
        forced_eos_token_id=target.rules.forced_eos_token_id,
    )


def _num_blocks(
    config: EngineConfig, models: list[Model], max_model_len: int, graphs: GraphPlan | None
) -> int:
    """Blocks of each pool: what the memory for caches holds, but not more than could ever be used."""
    bytes_per_block = config.block_size * sum(model.cache_bytes_per_token for model in models)
    devices = {layer.device for model in models for layer in model.layers}
    budget = cache_budget(config, devices, reserved=0 if graphs is None else graphs.memory)
    affordable = budget // bytes_per_block - (graphs is not None)
    longest = -(-max_model_len // config.block_size)
    if affordable < 1:
        raise ModelLoadError(
            f"{ByteSize(budget).human_readable()} for the caches (cache_memory) do not hold one block of "
            f"{config.block_size} tokens ({bytes_per_block} bytes)"
        )
    return min(affordable, longest * config.max_num_sequences)


def _translated(
    config: EngineConfig, target: Model, draft: ModelRunner, pool: BlockPool, pairing: Pairing
) -> TranslatedDraftProposer:
    assert pairing.translators is not None
    target_tokenizer, draft_tokenizer = pairing.translators
    return TranslatedDraftProposer(
        draft,
        pool,
        target_tokenizer,
        draft_tokenizer,
        max_len=min(
            draft.model.max_position or pool.num_blocks * pool.block_size, pool.num_blocks * pool.block_size
        ),
        max_batched_tokens=config.max_num_batched_tokens,
        vocab_size=target.vocab_size,
        eos_token_id=pairing.eos_token_id,
    )


def _check_kinds(target: Model, draft: Model) -> None:
    """A draft must be of the target's kind."""
    if target.has_encoder != draft.has_encoder:
        kinds = {True: "an encoder-decoder model", False: "a decoder only"}
        raise ModelLoadError(
            f"the target is {kinds[target.has_encoder]}, the draft {kinds[draft.has_encoder]}: "
            "they must be of one kind"
        )
