"""This module turns the configuration into the engine's objects; no other one wires them."""

import gc
import logging
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TypeGuard, cast

import torch

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
from truedraft.engine.core.window_blocks import WindowBlocks, WindowedPool
from truedraft.engine.cuda import torch_sampling
from truedraft.engine.cuda.device_ops import DeviceOps
from truedraft.engine.cuda.triton_sampling import Sampling
from truedraft.engine.errors import ModelLoadError
from truedraft.engine.hub.repository import shown_size
from truedraft.engine.hub.siblings import MOST, siblings, weights_size
from truedraft.engine.kv_events import KvEvents
from truedraft.engine.memory.cache_memory import free_memory
from truedraft.engine.messages import ASSISTANT, DRAFT_MODEL, MTP, Method
from truedraft.engine.models.adapters import AdapterTable, load_adapters
from truedraft.engine.models.base import Model
from truedraft.engine.models.cache_plan import plan_caches
from truedraft.engine.models.heads.assistant import Assistant, AssistantRunner
from truedraft.engine.models.heads.assistant_file import load_assistant
from truedraft.engine.models.heads.head import Head
from truedraft.engine.models.heads.loader import head_method, load_head
from truedraft.engine.models.heads.mtp import has_mtp
from truedraft.engine.models.heads.vocabulary import count_tokens
from truedraft.engine.models.hf.encoder_decoder import EncoderDecoderModel
from truedraft.engine.models.kept_prefixes import Cached, keep_prefixes
from truedraft.engine.models.lengths import limits_of, max_model_len_of
from truedraft.engine.models.load import load_model
from truedraft.engine.models.model_runner import ModelRunner
from truedraft.engine.models.options import LoadOptions, draft_source, load_options
from truedraft.engine.models.plausibility import warn_if_misread
from truedraft.engine.models.ranks import load_ranked
from truedraft.engine.models.vision import Tower, load_vision
from truedraft.engine.native.decoder import NativeDecoder
from truedraft.engine.native.ops import NativeOps, native_ops
from truedraft.engine.native.threads import set_num_threads, usual_num_threads
from truedraft.engine.proposers.assistant import AssistantProposer
from truedraft.engine.proposers.checks import check_proposers, default_method
from truedraft.engine.proposers.draft_model import DraftModelProposer
from truedraft.engine.proposers.grammar import GrammarProposer
from truedraft.engine.proposers.heads.proposer import LOOKAHEAD, HeadProposer
from truedraft.engine.proposers.ngram import NgramPool, NgramProposer
from truedraft.engine.proposers.prediction import PredictionProposer
from truedraft.engine.proposers.translated.pairing import Pairing, pair_models
from truedraft.engine.proposers.translated.proposer import TranslatedDraftProposer
from truedraft.engine.rounds.calibrate import calibrate
from truedraft.engine.rounds.capture.graphs import RoundGraphs
from truedraft.engine.rounds.capture.plan import plan_graphs
from truedraft.engine.rounds.draft_trial import LENGTH, ROOM, Trial, accepted_by_place, beginnings, trial_of
from truedraft.engine.rounds.draft_vocabulary import choose_output
from truedraft.engine.rounds.native_loop import NativeLoop
from truedraft.engine.rounds.round import RoundRunner
from truedraft.engine.sampling.grammar import Grammars
from truedraft.engine.sampling.grammar_tokenizer import load_tokenizer
from truedraft.engine.sampling.torch_ops import RoundOps, TorchOps
from truedraft.engine.speculation.costs import Costs
from truedraft.engine.speculation.planner import SpeculationPlanner

# The operations of smaller models are so short that torch's other threads mostly wait. The native kernels
# wake only as many threads as save time.
MIN_PARAMETERS_FOR_TORCH_THREADS = 50_000_000
# A draft that the user did not ask for is used if its expected speed-up is at least this.
MIN_GAIN = 1.1

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Drafting:
    """Holds the draft model, the head or the assistant that drafts, and how it was chosen."""

    name: str | None = None  # the value of the setting ``draft`` that would choose the same
    draft: Model | None = None
    head: Head | None = None
    assistant: Assistant | None = None
    pairing: Pairing | None = None  # says how the draft model's vocabulary relates to the target's
    tried: tuple[str, ...] = ()  # one line for each further draft that was measured


@dataclass(frozen=True, slots=True)
class Models:
    """Holds the loaded models and the longest text that they serve, in tokens."""

    target: Model
    drafting: Drafting
    encoder_decoder: EncoderDecoderLimits | None
    max_model_len: int
    adapters: AdapterTable | None = None
    vision: Tower | None = None

    @property
    def draft(self) -> Model | None:
        return self.drafting.draft

    @property
    def head(self) -> Head | None:
        return self.drafting.head


@dataclass(frozen=True, slots=True)
class Memory:
    """Holds the models with their caches, the pools that hand out the caches' blocks, and captured CUDA
    graphs."""

    target: ModelRunner
    draft: ModelRunner | None
    head: ModelRunner | None
    assistant: AssistantRunner | None
    target_pool: BlockPool
    draft_pool: BlockPool
    head_pool: BlockPool
    graphs: RoundGraphs | None
    sampling: Sampling

    @property
    def native(self) -> NativeDecoder | None:
        """Returns the C code that runs the target's passes, or None if torch runs them."""
        return self.target.fast_pass if isinstance(self.target.fast_pass, NativeDecoder) else None


def build_engine(
    config: EngineConfig,
    begin: Callable[[str], None] = lambda stage: None,
    proposers: Sequence[Proposer] = (),
) -> EngineCore:
    """Loads the models, allocates the caches and wires the engine; raises ``ModelLoadError`` if it cannot.

    ``begin`` is called with the name of each stage that takes long. ``proposers`` draft in addition to the
    configured draft.
    """
    models = load_models(config, begin)
    begin("caches and costs")
    memory = allocate(config, models)
    all_proposers = [*_draft_model(config, models, memory), *_head(models, memory), *proposers]
    for proposer in proposers:
        if not isinstance(proposer, Proposer) or not getattr(proposer, "name", None):
            raise ModelLoadError(f"{proposer!r} is no proposer: it must be a Proposer, and have a name")
        proposer.attach(memory.target)
    check_proposers(all_proposers, models.target)
    runner = make_runner(config, memory, all_proposers)
    core = make_core(config, models, memory, all_proposers, runner)
    if config.prefix_cache_dir is not None:
        keep_prefixes(config, core, _cached(config, models, memory))
    if config.kv_events_endpoint is not None:
        pool = memory.target_pool
        if not core.scheduler.prefix_caching or pool.states is not None:
            raise ModelLoadError(
                "kv_events_endpoint is for models that can begin with any blocks of their cache"
            )
        pool.events = KvEvents(config.kv_events_endpoint, config.kv_events_topic, pool.block_size)
        core.when_stepped = pool.events.send
    return core


def _cached(config: EngineConfig, models: Models, memory: Memory) -> list[Cached]:
    """Returns the caches whose prefixes files may keep: the target's, and that of what drafts with a
    model."""
    assert config.target is not None  # filled in by EngineConfig
    name = models.drafting.name
    path = config.target if name in (None, MTP, *SELF_DRAFTS) else str(name)
    of_target, drafts = memory.target_pool, _drafts(models, memory).values()
    own = [Cached(pool, runner, path) for runner, pool in drafts if pool is not of_target]
    return [Cached(of_target, memory.target, config.target), *own]


def drafting_method(draft: str) -> Method:
    """Returns the method that drafts with what the setting ``draft`` names."""
    if draft == AUTO:
        return "auto"
    return DRAFT_MODEL if draft in SELF_DRAFTS else head_method(draft) or DRAFT_MODEL


def load_models(config: EngineConfig, begin: Callable[[str], None]) -> Models:
    """Loads the target and the draft, and sets the number of threads that they use."""
    options = load_options(config)
    device = options.device
    if device.type == "cuda":
        if device.index is not None:
            torch.cuda.set_device(device)  # Pinned memory, events and Triton take the current device.
        # Sums for few rows and for many rows are then rounded alike, except for their order.
        torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = False
        # cuDNN prepares an attention kernel for every new prompt length, which takes tenths of a second.
        torch.backends.cuda.enable_cudnn_sdp(False)
    assert config.target is not None  # EngineConfig filled it in.
    begin("the target model")
    is_ranked = config.tensor_parallel_size > 1
    target: Model = load_ranked(config) if is_ranked else load_model(config.target, options)
    warn_if_misread(target, config.target)
    adapters = load_adapters(target, config)  # before anything has caches over the target
    vision = load_vision(target, config, options)
    num_threads = config.num_threads or _num_threads(target)
    if is_ranked:
        pass  # The ranks have divided the threads among them.
    elif config.native_kernels and device.type == "cpu":
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
        return Models(target, drafting, None, max_model_len_of(config, target), adapters, vision)
    limits = limits_of(config, target, drafting.draft)
    longest = limits.max_prompt_len + len(limits.start_ids) + limits.max_output_len
    return Models(target, drafting, limits, longest)


def load_draft(config: EngineConfig, target: Model) -> Drafting:
    """Loads the draft that the settings name."""
    assert config.target is not None  # EngineConfig filled it in.
    source, options = draft_source(config)
    if (head := _load_head(config, target, options)) is not None:
        return Drafting(config.draft, head=head)
    if isinstance(config.draft_vocab_size, int) or config.draft_vocab_file is not None:
        raise ModelLoadError(
            f"draft_vocab_size and draft_vocab_file are of heads, and {config.draft} is none: leave them out"
        )
    if drafting_method(source) == ASSISTANT:
        if config.tensor_parallel_size > 1:
            raise ModelLoadError(
                f"{config.draft} is an assistant, which looks at keys and values that no rank has whole: "
                "leave out tensor_parallel_size, or take a draft model"
            )
        return Drafting(config.draft, assistant=load_assistant(source, target, options))
    draft = load_model(source, options)
    if config.draft not in SELF_DRAFTS:
        warn_if_misread(draft, source)
    _check_kinds(target, draft)
    pairing = pair_models(config.target, source, target.vocab_size, draft.vocab_size)
    return Drafting(config.draft, draft, pairing=pairing)


def choose_draft(config: EngineConfig, target: Model) -> Drafting:
    """Returns the fastest draft among the models next to the target and a head in its own checkpoint, by
    passes that are measured here; an empty ``Drafting`` if none pays."""
    assert config.target is not None  # EngineConfig filled it in.
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
        # The trial's engine has reference cycles; a draft that is not chosen must give its memory back.
        gc.collect()
    if measured:
        others = [f"--draft {name}" for name in (*measured, "none") if name != (best.name or "none")]
        tried.append(f"{best.name or 'none'} is taken; otherwise: {' or '.join(others)}")
    for line in tried:
        logger.info("draft is auto: %s", line)
    return replace(best, tried=tuple(tried))


def _candidates(target: str) -> Iterator[tuple[str, int]]:
    """Yields each draft that could serve the target, with the bytes that its weights take in addition."""
    if has_mtp(target):
        yield MTP, 0
    most = weights_size(Path(target).expanduser())
    yield from [(each.path, each.num_bytes) for each in siblings(target) if each.num_bytes < most][:MOST]


def _trial(config: EngineConfig, models: Models) -> Trial:
    """Measures a draft in an engine of its own that has memory for one short text."""
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
    """Allocates the caches, and captures passes as CUDA graphs where the device allows it."""
    planned = None
    if config.tensor_parallel_size == 1:
        planned = plan_graphs(config, models.target, models.draft, models.max_model_len, models.head)
    others = (models.draft, None if models.head is None else models.head.model)
    loaded = [models.target, *(model for model in others if model is not None)]
    pairing = models.drafting.pairing
    num_blocks, num_state_slots, windows = plan_caches(
        config, loaded, models.max_model_len, planned, 2 if pairing and pairing.translators is None else 1
    )
    # The last block belongs to no pool: graphs write the keys and values of padding there.
    cached_blocks = num_blocks + (planned is not None)
    runners = [
        ModelRunner.build(model, cached_blocks, config.block_size, num_state_slots, own)
        for model, own in zip(loaded, windows, strict=True)
    ]
    target, graphs = runners[0], None
    draft = None if models.draft is None else runners[1]
    head = None if models.head is None else runners[1]
    if planned is not None:
        target, draft, head, graphs = planned.captured(target, draft, head, num_blocks)
    assistant = None
    if models.drafting.assistant is not None:
        num_rows = config.num_sequences_on(target.device.type)
        assistant = AssistantRunner(models.drafting.assistant, target, num_rows)
    target_pool = _pool(num_blocks, config.block_size, num_state_slots, target, windows[0])
    draft_pool = _pool(num_blocks, config.block_size, num_state_slots, draft, windows[1] if draft else None)
    head_pool = BlockPool(num_blocks, config.block_size, lookahead=LOOKAHEAD)
    sampling = torch_sampling if planned is None else planned.sampling
    return Memory(target, draft, head, assistant, target_pool, draft_pool, head_pool, graphs, sampling)


def _pool(
    num_blocks: int,
    block_size: int,
    num_state_slots: int,
    model: ModelRunner | None,
    windows: WindowBlocks | None = None,
) -> BlockPool:
    """Returns a pool for the model's cache, with slots if the model has recurrent states."""
    has_states = model is not None and model.cache.states
    states = StateSlots(num_state_slots, model.cache.copy_state) if model and has_states else None
    if windows is not None:
        return WindowedPool(num_blocks, block_size, windows, states)
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
    assert config.target is not None  # EngineConfig filled it in.
    target = models.target
    pool = NgramPool(config.num_pool_tokens) if config.num_pool_tokens else None
    lookups: list[Lookup] = [
        GrammarProposer(),
        PredictionProposer(),
        NgramProposer(config.ngram_min_match, config.ngram_max_tokens, config.ngram_choice, pool),
    ]
    costs = _costs(config, models, memory, proposers, runner)
    length = _fixed_length(config)
    planner = SpeculationPlanner(costs, lookups, proposers, is_fixed=length is not None)
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
            # An encoder's states of a beginning depend on the text after it, so no prefix can be shared.
            prefix_caching=config.prefix_caching and models.encoder_decoder is None,
            prompt_seconds=config.prompt_seconds,
        ),
        admission=Admission(
            vocab_size=target.vocab_size,
            max_model_len=models.max_model_len,
            eos_token_ids=target.eos_token_ids,
            methods=tuple([lookup.name for lookup in lookups] + [proposer.name for proposer in proposers]),
            method=default_method(config, proposers),
            num_speculative_tokens=length,
            verification=None if config.verification == "auto" else config.verification,
            draft_sample_method=None if config.draft_sample_method == "auto" else config.draft_sample_method,
            drawing=frozenset(proposer.name for proposer in proposers if proposer.draws),
            encoder_decoder=models.encoder_decoder,
            has_rules=bool(target.rules),
            adapters=models.adapters,
            vision=models.vision,
            grammars=Grammars(
                partial(load_tokenizer, config.target, target.vocab_size, target.eos_token_ids)
            ),
        ),
        drafter=models.drafting.name,
        tried=models.drafting.tried,
    )


def _fixed_length(config: EngineConfig) -> int | None:
    """Returns the draft length if the settings fix one."""
    return None if config.num_speculative_tokens == "auto" else config.num_speculative_tokens


def _costs(
    config: EngineConfig, models: Models, memory: Memory, proposers: Sequence[Proposer], runner: Runner
) -> Costs:
    """Returns the time of a round's passes, measured where the draft length is to be chosen."""
    step_seconds = config.step_seconds if memory.native is not None else 0.0
    if _fixed_length(config) is not None:
        return Costs.uncalibrated([proposer.name for proposer in proposers], step_seconds)
    max_tokens = config.num_sequences_on(memory.target.device.type) * (max(AUTO_LIMITS.values()) + 1)
    drafts = _drafts(models, memory)
    return calibrate(memory.target, memory.target_pool, drafts, max_tokens, step_seconds)


def _drafts(models: Models, memory: Memory) -> dict[str, tuple[ModelRunner, BlockPool]]:
    """Returns the models that proposers use, by their names, with the pools that their passes read."""
    drafts: dict[str, tuple[ModelRunner, BlockPool]]
    drafts = {} if memory.draft is None else {DRAFT_MODEL: (memory.draft, memory.draft_pool)}
    if models.head is not None and memory.head is not None:
        drafts[models.head.method] = memory.head, memory.head_pool
    if memory.assistant is not None:
        drafts[ASSISTANT] = memory.assistant, memory.target_pool
    return drafts


def _draft_model(config: EngineConfig, models: Models, memory: Memory) -> list[Proposer]:
    """Returns the proposer of the draft model, if there is one."""
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
    """Returns the head that the settings name, and the tokens that it can draft."""
    assert config.target is not None  # EngineConfig filled it in.
    assert config.draft is not None
    head = load_head(config.draft, target, config.target, options)
    if head is None:
        return None
    file = config.draft_vocab_file
    counts = None if file is None else count_tokens(file, config.target)
    return choose_output(head, target, config.draft_vocab_size, counts, _fixed_length(config))


def _head(models: Models, memory: Memory) -> list[Proposer]:
    """Returns the proposer of the head or of the assistant, if there is one."""
    if memory.assistant is not None:
        return [AssistantProposer(memory.assistant)]
    if models.head is None or memory.head is None:
        return []
    return [HeadProposer(models.head, memory.head, memory.head_pool, models.target.vocab_size)]


def _ops(config: EngineConfig, memory: Memory) -> RoundOps:
    """Returns what adjusts, draws and judges in every round."""
    target, rules = memory.target, memory.target.model.rules
    if memory.graphs is not None:
        # A captured pass scores no more positions, and memory is reserved for the verdicts on these.
        max_drafts, max_judged = memory.graphs.rows.max_drafts, len(memory.graphs.logits)
        return DeviceOps(memory.sampling, max_drafts, max_judged, target.device, rules)
    native = native_ops(rules) if config.native_kernels and target.device.type == "cpu" else None
    return native or TorchOps(rules)


def _num_threads(target: Model) -> int:
    """Returns the default number of threads for the CPU's share of the work."""
    few = target.num_parameters < MIN_PARAMETERS_FOR_TORCH_THREADS
    return 1 if few and not target.is_native else usual_num_threads()


def _check_kinds(target: Model, draft: Model) -> None:
    """Refuses a draft of another kind than the target's: both are decoders, or both have encoders."""
    if target.has_encoder != draft.has_encoder:
        kinds = {True: "an encoder-decoder model", False: "a decoder only"}
        raise ModelLoadError(
            f"the target is {kinds[target.has_encoder]}, the draft {kinds[draft.has_encoder]}: "
            "they must be of one kind"
        )
