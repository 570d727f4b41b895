"""The one place where configuration becomes concrete objects."""

import gc
import logging
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TypeGuard, cast

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
from truedraft.engine.errors import ModelLoadError
from truedraft.engine.hub.repository import shown_size
from truedraft.engine.hub.siblings import MOST, siblings, weights_size
from truedraft.engine.memory.cache_memory import CacheSizes, cache_budget, cache_sizes, free_memory
from truedraft.engine.messages import DRAFT_MODEL, EAGLE, MTP, Method
from truedraft.engine.models.base import Model
from truedraft.engine.models.heads.head import Head
from truedraft.engine.models.heads.loader import head_method, load_head
from truedraft.engine.models.heads.mtp import has_mtp
from truedraft.engine.models.heads.vocabulary import count_tokens
from truedraft.engine.models.hf.encoder_decoder import EncoderDecoderModel
from truedraft.engine.models.kept_prefixes import Cached, keep_prefixes
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
from truedraft.engine.rounds.capture.runner import CudaRunner
from truedraft.engine.rounds.draft_trial import LENGTH, ROOM, Trial, accepted_by_place, beginnings, trial_of
from truedraft.engine.rounds.draft_vocabulary import choose_output
from truedraft.engine.rounds.native_loop import NativeLoop
from truedraft.engine.rounds.round import PhaseRunner
from truedraft.engine.sampling.grammar import Grammars
from truedraft.engine.sampling.grammar_tokenizer import load_tokenizer
from truedraft.engine.sampling.torch_ops import RoundOps, TorchOps
from truedraft.engine.speculation.costs import Costs
from truedraft.engine.speculation.planner import SpeculationPlanner

# The operations of smaller models are so short that torch's other threads mostly wait. The native kernels
# themselves wake only threads that pay.
MIN_PARAMETERS_FOR_TORCH_THREADS = 50_000_000
# A draft that was not asked for is taken if its expected speed-up is at least this.
MIN_GAIN = 1.1

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Drafting:
    """Holds what drafts by a model: a draft model with its ``pairing``, or a head. ``name`` is
    the setting ``draft`` that it amounts to, ``tried`` says what else was measured."""

    name: str | None = None
    draft: Model | None = None
    head: Head | None = None
    pairing: Pairing | None = None
    tried: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Models:
    """What is loaded, and how long texts may be."""

    target: Model
    drafting: Drafting
    encoder_decoder: EncoderDecoderLimits | None
    max_model_len: int

    @property
    def draft(self) -> Model | None:
        return self.drafting.draft

    @property
    def head(self) -> Head | None:
        return self.drafting.head


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
    core = make_core(config, models, memory, all_proposers, runner)
    if config.prefix_cache_dir is not None:
        keep_prefixes(config, core, *_cached(config, models, memory))
    return core


def _cached(config: EngineConfig, models: Models, memory: Memory) -> tuple[Cached, list[Cached]]:
    """Returns the caches whose prefixes files may keep: the target's, and that of what drafts with a
    model."""
    assert config.target is not None  # filled in by EngineConfig
    target = Cached(memory.target_pool, models.target, memory.target.cache, config.target)
    name = models.drafting.name
    if name is None:
        return target, []
    path = config.target if name == MTP or name in SELF_DRAFTS else name
    others = []
    if memory.draft is not None:
        others.append(Cached(memory.draft_pool, memory.draft.model, memory.draft.cache, path))
    if memory.head is not None:
        others.append(Cached(memory.head_pool, memory.head.model, memory.head.cache, path))
    return target, others


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
    drafting = Drafting()
    if config.draft is not None and config.num_speculative_tokens != 0 and config.method != "none":
        if config.draft != AUTO:
            begin("the draft model")
            drafting = load_draft(config, target)
        elif config.method != "ngram":
            begin("what may draft")
            drafting = choose_draft(config, target)
    if not isinstance(target, EncoderDecoderModel):
        return Models(target, drafting, None, _max_model_len(config, target))
    limits = _encoder_decoder_limits(config, target, drafting.draft)
    longest = limits.max_prompt_len + len(limits.start_ids) + limits.max_output_len
    return Models(target, drafting, limits, longest)


def load_draft(config: EngineConfig, target: Model) -> Drafting:
    """Loads the draft that the settings name."""
    assert config.target is not None  # filled in by EngineConfig
    source, options = draft_source(config)
    if (head := _load_head(config, target, options)) is not None:
        return Drafting(config.draft, head=head)
    if isinstance(config.draft_vocab_size, int) or config.draft_vocab_file is not None:
        raise ModelLoadError(
            f"draft_vocab_size and draft_vocab_file are of heads, and {config.draft} is none: leave them out"
        )
    draft = load_model(source, options)
    if config.draft not in SELF_DRAFTS:
        warn_if_misread(draft, source)
    _check_kinds(target, draft)
    pairing = pair_models(config.target, source, target.vocab_size, draft.vocab_size)
    return Drafting(config.draft, draft, pairing=pairing)


def choose_draft(config: EngineConfig, target: Model) -> Drafting:
    """Returns the fastest of what lies next to the target, a head in its own checkpoint included, by passes
    that are measured here; nothing where none of them pays."""
    assert config.target is not None  # filled in by EngineConfig
    if target.has_encoder:
        return Drafting()
    best, best_gain = Drafting(), MIN_GAIN
    tried: list[str] = []
    measured: list[str] = []
    for name, num_bytes in _candidates(config.target):
        if num_bytes > (free := free_memory(target.device)):
            sizes = f"it takes {shown_size(num_bytes)}, and {shown_size(free)} are free"
            tried.append(f"{name} is not tried: {sizes}")
            continue
        try:
            drafting = load_draft(config.model_copy(update={"draft": name}), target)
            trial = _trial(config, Models(target, drafting, None, min(ROOM, target.max_position or ROOM)))
        except (ModelLoadError, torch.OutOfMemoryError) as error:
            tried.append(f"{name} is not tried: {error}")
            continue
        tried.append(f"{name}: {trial}")
        measured.append(name)
        if trial.gain >= best_gain:
            best, best_gain = drafting, trial.gain
        del drafting
        gc.collect()  # the trial's engine has cycles, and what is not taken gives its memory back
    if measured:
        others = [f"--draft {name}" for name in (*measured, "none") if name != (best.name or "none")]
        tried.append(f"{best.name or 'none'} is taken; otherwise: {' or '.join(others)}")
    for line in tried:
        logger.info("draft is auto: %s", line)
    return replace(best, tried=tuple(tried))


def _candidates(target: str) -> Iterator[tuple[str, int]]:
    """Yields what may draft for the model at ``target``, and the bytes that its weights take in addition."""
    if has_mtp(target):
        yield MTP, 0
    most = weights_size(Path(target).expanduser())
    yield from [(each.path, each.num_bytes) for each in siblings(target) if each.num_bytes < most][:MOST]


def _trial(config: EngineConfig, models: Models) -> Trial:
    """Measures a draft in an engine of its own, which has room for one short text."""
    length = _fixed_length(config)
    fixed = {"num_speculative_tokens": length or LENGTH, "method": "auto", "prefix_caching": False}
    small = {"max_num_sequences": 1, "cache_memory": None, "cuda_graphs": False, "step_seconds": 0.0}
    config = config.model_copy(update={**fixed, **small})
    memory = allocate(config, models)
    proposers = [*_draft_model(config, models, memory), *_head(models, memory)]
    core = make_core(config, models, memory, proposers, make_runner(config, memory, proposers))
    name = proposers[0].name
    ids = beginnings(str(config.target), models.target.vocab_size)
    accepted = accepted_by_place(core, cast(Method, name), ids, length or LENGTH)
    scored = (length or LENGTH) + 1
    costs = calibrate(memory.target, memory.target_pool, _drafts(models, memory), scored)
    lengths = range(1, LENGTH + 1) if length is None else [length]
    return trial_of(accepted, costs.score, costs.drafts[name], lengths)


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
    return Memory(target, draft, head, target_pool, draft_pool, head_pool, graphs)


def _pool(num_blocks: int, block_size: int, num_state_slots: int, model: ModelRunner | None) -> BlockPool:
    """Returns a pool for the model's cache, with slots if it keeps states."""
    has_states = model is not None and model.cache.states
    states = StateSlots(num_state_slots, model.cache.copy_state) if model and has_states else None
    return BlockPool(num_blocks, block_size, states)


def make_runner(config: EngineConfig, memory: Memory, proposers: Sequence[Proposer]) -> Runner:
    """Makes what runs rounds, with captured passes on a GPU and a loop in C for small models."""
    target = memory.target
    ops = _ops(config, target)
    phases = PhaseRunner(target, proposers, ops, config.step_seconds if memory.native is not None else 0.0)
    if memory.native is not None and isinstance(ops, NativeOps):
        draft = next((own for own in proposers if _draws_in_c(own)), None)
        phases.loop = NativeLoop(memory.native, draft, phases.table, config.step_seconds)
        return phases
    observers = [proposer for proposer in proposers if not proposer.can_lag]
    kinds = HeadProposer, DraftModelProposer
    drafting = next((own for own in proposers if isinstance(own, kinds)), None)
    if any(observer is not drafting for observer in observers):
        return phases
    if memory.graphs is not None and (memory.draft is None or drafting is not None):
        return CudaRunner(memory.graphs, drafting, phases)
    return phases


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
        drafter=models.drafting.name,
        tried=models.drafting.tried,
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
    drafts = _drafts(models, memory)
    return calibrate(memory.target, memory.target_pool, drafts, max_tokens, step_seconds)


def _drafts(models: Models, memory: Memory) -> dict[str, tuple[ModelRunner, BlockPool]]:
    """Returns the models of proposers by the proposers' names."""
    drafts = {} if memory.draft is None else {DRAFT_MODEL: (memory.draft, memory.draft_pool)}
    if models.head is not None and memory.head is not None:
        drafts[models.head.method] = memory.head, memory.head_pool
    return drafts


def _draft_model(config: EngineConfig, models: Models, memory: Memory) -> list[Proposer]:
    """Returns what drafts with the draft model, if there is one."""
    draft, pairing = memory.draft, models.drafting.pairing
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


def _load_head(config: EngineConfig, target: Model, options: LoadOptions) -> Head | None:
    """Returns the head that the settings name, with the tokens that it drafts."""
    assert config.target is not None  # filled in by EngineConfig
    assert config.draft is not None
    head = load_head(config.draft, target, config.target, options)
    if head is None:
        return None
    file = config.draft_vocab_file
    counts = None if file is None else count_tokens(file, config.target)
    return choose_output(head, target, config.draft_vocab_size, counts, _fixed_length(config))


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


def _ops(config: EngineConfig, target: ModelRunner) -> RoundOps:
    """Returns what adjusts, draws and judges in every round."""
    rules = target.model.rules
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
