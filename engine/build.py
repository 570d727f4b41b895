"""The one place where configuration becomes concrete objects."""

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TypeGuard

import torch
from pydantic import ByteSize

from truedraft.engine.config import AUTO, SELF_DRAFTS, EngineConfig
from truedraft.engine.core.admission import Admission, EncoderDecoderLimits
from truedraft.engine.core.block_pool import BlockPool
from truedraft.engine.core.engine import EngineCore
from truedraft.engine.core.planning import Lookup
from truedraft.engine.core.proposer import Proposer
from truedraft.engine.core.runner import Runner
from truedraft.engine.core.scheduler import Scheduler
from truedraft.engine.core.state_slots import StateSlots
from truedraft.engine.core.step import AUTO_LIMITS
from truedraft.engine.cuda import torch_sampling
from truedraft.engine.cuda.device_ops import DeviceOps
from truedraft.engine.cuda.triton_sampling import Sampling
from truedraft.engine.errors import ModelLoadError
from truedraft.engine.memory.cache_memory import CacheSizes, cache_budget, cache_sizes
from truedraft.engine.messages import DRAFT_MODEL, EAGLE, MTP, Method
from truedraft.engine.models.base import Model
from truedraft.engine.models.heads.head import Head
from truedraft.engine.models.heads.loader import head_method, load_head
from truedraft.engine.models.heads.vocabulary import count_tokens
from truedraft.engine.models.hf.encoder_decoder import EncoderDecoderModel
from truedraft.engine.models.load import load_model
from truedraft.engine.models.model_runner import ModelRunner
from truedraft.engine.models.options import LoadOptions, draft_source, load_options
from truedraft.engine.models.plausibility import warn_if_misread
from truedraft.engine.models.working_memory import prompt_bytes
from truedraft.engine.native.decoder import NativeDecoder
from truedraft.engine.native.ops import NativeOps, native_ops
from truedraft.engine.native.threads import set_num_threads, usual_num_threads
from truedraft.engine.proposers.draft_model import DraftModelProposer
from truedraft.engine.proposers.grammar import GrammarProposer
from truedraft.engine.proposers.heads.proposer import LOOKAHEAD, HeadProposer
from truedraft.engine.proposers.ngram import NgramProposer
from truedraft.engine.proposers.prediction import PredictionProposer
from truedraft.engine.proposers.translated.pairing import Pairing, pair_models
from truedraft.engine.proposers.translated.proposer import TranslatedDraftProposer
from truedraft.engine.rounds.calibrate import calibrate
from truedraft.engine.rounds.capture.graphs import RoundGraphs
from truedraft.engine.rounds.capture.plan import GraphPlan, plan_graphs
from truedraft.engine.rounds.draft_vocabulary import Chosen, choose_output
from truedraft.engine.rounds.native_loop import NativeLoop
from truedraft.engine.rounds.round import RoundRunner
from truedraft.engine.sampling.grammar import Grammars
from truedraft.engine.sampling.grammar_tokenizer import load_tokenizer
from truedraft.engine.sampling.torch_ops import RoundOps, TorchOps
from truedraft.engine.speculation.costs import Costs
from truedraft.engine.speculation.planner import SpeculationPlanner

# The operations of smaller models are so short that torch's other threads mostly wait. The native kernels
# themselves wake only threads that pay.
MIN_PARAMETERS_FOR_TORCH_THREADS = 50_000_000
# A head that was not asked for drafts if its expected speed-up is at least this.
MIN_GAIN = 1.1

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Models:
    """What is loaded, and how long texts may be. ``pairing`` is that of target and draft; ``chosen`` has the
    head, with an output layer."""

    target: Model
    draft: Model | None
    chosen: Chosen | None
    pairing: Pairing | None
    encoder_decoder: EncoderDecoderLimits | None
    max_model_len: int

    @property
    def head(self) -> Head | None:
        return None if self.chosen is None else self.chosen.head


@dataclass(frozen=True, slots=True)
class Memory:
    """The models over their caches, whose blocks the pools hand out, and what is captured of them."""

    target: ModelRunner
    draft: ModelRunner | None
    head: ModelRunner | None
    target_pool: BlockPool
    draft_pool: BlockPool
    head_pool: BlockPool
    graphs: RoundGraphs | None
    sampling: Sampling

    @property
    def native(self) -> NativeDecoder | None:
        """Returns the target's passes in C, if it has them."""
        return self.target.fast_pass if isinstance(self.target.fast_pass, NativeDecoder) else None


def build_engine(
    config: EngineConfig,
    begin: Callable[[str], None] = lambda stage: None,
    proposers: Sequence[Proposer] = (),
) -> EngineCore:
    """Loads the models, allocates the caches, wires the engine. ``ModelLoadError`` if that cannot be.

    ``begin`` hears the name of each stage that takes long. ``proposers`` draft, too.
    """
    models = load_models(config, begin)
    begin("caches and costs")
    memory = allocate(config, models)
    all_proposers = [*_draft_model(config, models, memory), *_head(models, memory), *proposers]
    for proposer in proposers:
        if not isinstance(proposer, Proposer) or not getattr(proposer, "name", None):
            raise ModelLoadError(f"{proposer!r} is no proposer: it must be a Proposer, and have a name")
        proposer.attach(memory.target)
    _check_proposers(all_proposers, models.target)
    runner = make_runner(config, memory, all_proposers)
    return make_core(config, models, memory, all_proposers, runner)


def drafting_method(draft: str) -> Method:
    """Returns who drafts with what the setting ``draft`` names."""
    if draft == AUTO:
        return "auto"
    return DRAFT_MODEL if draft in SELF_DRAFTS else head_method(draft) or DRAFT_MODEL


def load_models(config: EngineConfig, begin: Callable[[str], None]) -> Models:
    """Loads target and draft, and sets how many threads they take."""
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
    warn_if_misread(target, config.target)
    num_threads = config.num_threads or _num_threads(target)
    if config.native_kernels and device.type == "cpu":
        set_num_threads(num_threads)
    else:
        torch.set_num_threads(num_threads)
    draft = pairing = chosen = None
    if config.draft is not None and config.num_speculative_tokens != 0 and config.method != "none":
        begin("the draft model")
        source, draft_options = draft_source(config)
        chosen = _load_head(config, target, draft_options)
        if chosen is None and config.draft != AUTO:
            if isinstance(config.draft_vocab_size, int) or config.draft_vocab_file is not None:
                raise ModelLoadError(
                    f"draft_vocab_size and draft_vocab_file are of heads, and {config.draft} is none: leave "
                    "them out"
                )
            draft = load_model(source, draft_options)
            if config.draft not in SELF_DRAFTS:
                warn_if_misread(draft, source)
            _check_kinds(target, draft)
            pairing = pair_models(config.target, source, target.vocab_size, draft.vocab_size)
    if not isinstance(target, EncoderDecoderModel):
        return Models(target, draft, chosen, pairing, None, _max_model_len(config, target))
    limits = _encoder_decoder_limits(config, target, draft)
    longest = limits.max_prompt_len + len(limits.start_ids) + limits.max_output_len
    return Models(target, draft, chosen, pairing, limits, longest)


def allocate(config: EngineConfig, models: Models) -> Memory:
    """Allocates the caches, and captures passes where that can be."""
    planned = plan_graphs(config, models.target, models.draft, models.max_model_len, models.head)
    others = (models.draft, None if models.head is None else models.head.model)
    loaded = [models.target, *(model for model in others if model is not None)]
    num_blocks, num_state_slots = _cache_sizes(config, loaded, models.max_model_len, planned)
    # The last block is no pool's: graphs store their padding there.
    cached_blocks = num_blocks + (planned is not None)
    runners = [
        ModelRunner.build(model, cached_blocks, config.block_size, num_state_slots) for model in loaded
    ]
    target, graphs = runners[0], None
    draft = None if models.draft is None else runners[1]
    head = None if models.head is None else runners[1]
    if planned is not None:
        target, draft, head, graphs = planned.captured(target, draft, head, num_blocks)
    target_pool = _pool(num_blocks, config.block_size, num_state_slots, target)
    draft_pool = _pool(num_blocks, config.block_size, num_state_slots, draft)
    head_pool = BlockPool(num_blocks, config.block_size, lookahead=LOOKAHEAD)
    sampling = torch_sampling if planned is None else planned.sampling
    return Memory(target, draft, head, target_pool, draft_pool, head_pool, graphs, sampling)


def _pool(num_blocks: int, block_size: int, num_state_slots: int, model: ModelRunner | None) -> BlockPool:
    """Returns a pool for the model's cache, with slots if it keeps states."""
    has_states = model is not None and model.cache.states
    states = StateSlots(num_state_slots, model.cache.copy_state) if model and has_states else None
    return BlockPool(num_blocks, block_size, states)


def make_runner(config: EngineConfig, memory: Memory, proposers: Sequence[Proposer]) -> Runner:
    """Makes what runs rounds: over captured passes on a GPU, with a loop in C for small models on a CPU."""
    ops = _ops(config, memory)
    step_seconds = config.step_seconds if memory.native is not None else 0.0
    runner = RoundRunner(memory.target, proposers, ops, step_seconds, memory.graphs)
    if memory.native is not None and isinstance(ops, NativeOps):
        draft = next((own for own in proposers if _draws_in_c(own)), None)
        runner.loop = NativeLoop(memory.native, draft, runner.table, config.step_seconds)
    return runner


def _draws_in_c(proposer: Proposer) -> TypeGuard[DraftModelProposer]:
    return isinstance(proposer, DraftModelProposer) and isinstance(proposer.model.fast_pass, NativeDecoder)


def make_core(
    config: EngineConfig, models: Models, memory: Memory, proposers: Sequence[Proposer], runner: Runner
) -> EngineCore:
    """Puts planning, scheduling and admission around the ``runner``."""
    assert config.target is not None  # filled in by EngineConfig
    target = models.target
    lookups: list[Lookup] = [
        GrammarProposer(),
        PredictionProposer(),
        NgramProposer(config.ngram_min_match, config.ngram_max_tokens, config.ngram_choice),
    ]
    costs = _costs(config, models, memory, proposers, runner)
    length = _fixed_length(config)
    planner = SpeculationPlanner(
        costs,
        lookups,
        proposers,
        is_fixed=length is not None,
    )
    return EngineCore(
        target=memory.target,
        draft=memory.draft,
        runner=runner,
        scheduler=Scheduler(
            target_pool=memory.target_pool,
            max_num_sequences=config.num_sequences_on(target.device.type),
            max_num_batched_tokens=config.max_num_batched_tokens,
            planner=planner,
            proposers=proposers,
            # What an encoder makes of a beginning depends on what follows.
            prefix_caching=config.prefix_caching and models.encoder_decoder is None,
            prompt_seconds=config.prompt_seconds,
        ),
        admission=Admission(
            vocab_size=target.vocab_size,
            max_model_len=models.max_model_len,
            eos_token_ids=target.eos_token_ids,
            methods=tuple([lookup.name for lookup in lookups] + [proposer.name for proposer in proposers]),
            method=_method(config, proposers),
            num_speculative_tokens=length,
            verification=None if config.verification == "auto" else config.verification,
            draft_sample_method=None if config.draft_sample_method == "auto" else config.draft_sample_method,
            drawing=frozenset(proposer.name for proposer in proposers if proposer.draws),
            encoder_decoder=models.encoder_decoder,
            has_rules=bool(target.rules),
            grammars=Grammars(
                partial(load_tokenizer, config.target, target.vocab_size, target.eos_token_ids)
            ),
        ),
    )


def _fixed_length(config: EngineConfig) -> int | None:
    """Returns the draft length if the settings name one."""
    return None if config.num_speculative_tokens == "auto" else config.num_speculative_tokens


def _costs(
    config: EngineConfig, models: Models, memory: Memory, proposers: Sequence[Proposer], runner: Runner
) -> Costs:
    """Returns what rounds take, measured where the draft length is open."""
    step_seconds = config.step_seconds if memory.native is not None else 0.0
    if _fixed_length(config) is not None:
        return Costs.uncalibrated([proposer.name for proposer in proposers], step_seconds)
    max_tokens = config.num_sequences_on(memory.target.device.type) * (max(AUTO_LIMITS.values()) + 1)
    drafts = {} if memory.draft is None else {DRAFT_MODEL: (memory.draft, memory.draft_pool)}
    if models.head is not None and memory.head is not None:
        drafts[models.head.method] = memory.head, memory.head_pool
    return calibrate(memory.target, memory.target_pool, drafts, max_tokens, step_seconds)


def _draft_model(config: EngineConfig, models: Models, memory: Memory) -> list[Proposer]:
    """Returns what drafts with the draft model, if there is one."""
    draft, pairing = memory.draft, models.pairing
    if draft is None or pairing is None:
        return []
    max_len = models.max_model_len
    if models.encoder_decoder is None:
        max_len = min(max_len, draft.model.max_position or max_len)
    pool, vocab_size = memory.draft_pool, models.target.vocab_size
    if pairing.translators is None:
        return [DraftModelProposer(draft, pool, max_len, vocab_size)]
    if models.encoder_decoder is not None:
        raise ModelLoadError("the draft of an encoder-decoder target must share its tokenizer")
    num_slots = pool.num_blocks * pool.block_size
    return [
        TranslatedDraftProposer(
            draft,
            pool,
            *pairing.translators,
            max_len=max_len,
            max_num_ids=min(draft.model.max_position or num_slots, num_slots),
            max_batched_tokens=config.max_num_batched_tokens,
            vocab_size=vocab_size,
            eos_token_id=pairing.eos_token_id,
        )
    ]


def _load_head(config: EngineConfig, target: Model, options: LoadOptions) -> Chosen | None:
    """Returns the head that the settings name, or one that pays, with the tokens that it drafts."""
    assert config.target is not None  # filled in by EngineConfig
    assert config.draft is not None
    is_asked = config.draft != AUTO
    if not is_asked and not target.is_native:
        logger.info("draft is auto: a head is tried only where the target's layers run in C")
        return None
    try:
        head = load_head(config.draft if is_asked else MTP, target, config.target, options)
    except ModelLoadError as error:
        if is_asked:
            raise
        logger.info("draft is auto, and nothing drafts: %s", error)
        return None
    if head is None:
        return None
    file = config.draft_vocab_file
    counts = None if file is None else count_tokens(file, config.target)
    chosen = choose_output(head, target, config.draft_vocab_size, counts, _fixed_length(config))
    if is_asked or chosen.gain >= MIN_GAIN:
        return chosen
    logger.info("draft is auto: the head in %s would make %.2f times the speed", config.target, chosen.gain)
    return None


def _head(models: Models, memory: Memory) -> list[Proposer]:
    """Returns what drafts with the head, if there is one."""
    if models.head is None or memory.head is None:
        return []
    return [HeadProposer(models.head, memory.head, memory.head_pool, models.target.vocab_size)]


def _check_proposers(proposers: Sequence[Proposer], target: Model) -> None:
    """Refuses what could not be told apart, or could not be told what it asks for."""
    taken = {"auto", "none", *AUTO_LIMITS}
    for proposer in proposers:
        name, num_layers = proposer.name, target.num_layers
        if name in taken:
            raise ModelLoadError(
                f"two proposers are named {name!r}, or it is another source's name: choose one"
            )
        taken.add(name)
        if proposer.taps and proposer.can_lag:
            raise ModelLoadError(f"proposer {name!r} taps layers, so it cannot lag: set can_lag to False")
        if proposer.taps and not target.has_taps:
            kind = target.config.model_type
            raise ModelLoadError(
                f"proposer {name!r} taps layers, but {kind} models are not fused: none can be"
            )
        if not all(-num_layers <= tap <= num_layers for tap in proposer.taps):
            raise ModelLoadError(
                f"proposer {name!r} taps {list(proposer.taps)}; the target has {num_layers} layers"
            )


def _ops(config: EngineConfig, memory: Memory) -> RoundOps:
    """Returns what adjusts, draws and judges in every round."""
    target, rules = memory.target, memory.target.model.rules
    if memory.graphs is not None:
        return DeviceOps(memory.sampling, memory.graphs.rows.max_drafts, target.device, rules)
    native = native_ops(rules) if config.native_kernels and target.device.type == "cpu" else None
    return native or TorchOps(rules)


def _num_threads(target: Model) -> int:
    """Threads for the CPU's share of the work by default."""
    few = target.num_parameters < MIN_PARAMETERS_FOR_TORCH_THREADS
    return 1 if few and not target.is_native else usual_num_threads()


def _method(config: EngineConfig, proposers: Sequence[Proposer]) -> Method:
    if config.method == "auto" and not proposers and config.num_speculative_tokens != "auto":
        return "none"  # n-grams alone can cost more than they give; a fixed length could not be helped
    names = {proposer.name for proposer in proposers}
    wanted = {
        DRAFT_MODEL: "no draft model",
        EAGLE: "the draft is no EAGLE-3 head, or none",
        MTP: "the draft is no MTP head, or none",
    }
    for name, what in wanted.items():
        if config.method == name and name not in names:
            raise ModelLoadError(f"method is {name}, but {what} is given")
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


def _cache_sizes(
    config: EngineConfig, models: list[Model], max_model_len: int, graphs: GraphPlan | None
) -> CacheSizes:
    """Returns what the memory for caches holds, but not more than could ever be used."""
    bytes_per_block = config.block_size * sum(model.cache_bytes_per_token for model in models)
    state_bytes = sum(model.state_bytes_per_sequence for model in models)
    devices = {cache.device for model in models for cache in model.caches}
    num_sequences = config.num_sequences_on(models[0].device.type)
    num_logits = 0 if graphs is None else graphs.num_scored + num_sequences
    reserved = prompt_bytes(models, config.max_num_batched_tokens, num_logits)
    budget = cache_budget(config, devices, reserved + (0 if graphs is None else graphs.memory))
    if graphs is not None:
        budget -= bytes_per_block
    longest = -(-max_model_len // config.block_size)
    sizes = cache_sizes(
        budget,
        bytes_per_block,
        state_bytes,
        config.block_size,
        num_sequences,
        longest * num_sequences,
    )
    if sizes.num_blocks < 1:
        states = f" and the states of one sequence ({state_bytes} bytes)" if state_bytes else ""
        raise ModelLoadError(
            f"{ByteSize(budget).human_readable()} for the caches (cache_memory) do not hold one block of "
            f"{config.block_size} tokens ({bytes_per_block} bytes){states}"
        )
    return sizes


def _check_kinds(target: Model, draft: Model) -> None:
    """A draft must be of the target's kind."""
    if target.has_encoder != draft.has_encoder:
        kinds = {True: "an encoder-decoder model", False: "a decoder only"}
        raise ModelLoadError(
            f"the target is {kinds[target.has_encoder]}, the draft {kinds[draft.has_encoder]}: "
            "they must be of one kind"
        )
