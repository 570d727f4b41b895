"""Takes requests in and gives a few tokens of each sequence out, step by step.

``EngineCore.step`` is the whole loop. It knows token ids, neither tensors nor text nor processes: a runner
executes steps, ``worker`` runs the loop next to a socket, ``llm`` in place.
"""

from collections.abc import Callable, Sequence, Set
from concurrent.futures import Future
from typing import TYPE_CHECKING, Any

from truedraft.engine.core.admission import NO_ADAPTERS, Admission, RequestError
from truedraft.engine.core.commit import EngineStats, commit
from truedraft.engine.core.runner import Runner
from truedraft.engine.core.scheduler import Scheduler
from truedraft.engine.core.sequence import is_scored_alone
from truedraft.engine.messages import Adapter, Failed, Generate, Stats, TokenOutput

if TYPE_CHECKING:
    from truedraft.engine.memory.pictures import PromptPictures


class EngineCore:
    """Is the engine; ``build`` makes its parts. ``target`` and ``draft`` are the models, for descriptions of
    the engine. ``drafter`` is the setting ``draft`` that the draft amounts to, and ``tried`` says what was
    measured where that was left to the engine."""

    def __init__(
        self,
        target: Any,
        draft: Any | None,
        runner: Runner,
        scheduler: Scheduler,
        admission: Admission,
        drafter: str | None = None,
        tried: Sequence[str] = (),
    ) -> None:
        self.target = target
        self.draft = draft
        self.runner = runner
        self.scheduler = scheduler
        self.planner = scheduler.planner
        self.admission = admission
        self.drafter = drafter
        self.tried = tried
        self.stats = EngineStats()
        self.when_stepped: Callable[[], None] = lambda: None

    def step(self) -> list[TokenOutput | Failed]:
        """Runs one step; returns tokens of every sequence that took part, none if there is nothing to do."""
        plan = self.scheduler.schedule()  # who takes part, who drafts, how much and for how many rounds
        if not plan:
            self.scheduler.rest()
            return []
        result = self.runner.run(plan)  # draft, score, verify: one round, or several where they are short
        outputs = commit(plan, result, self.scheduler, self.stats)  # append, truncate, publish, finish, count
        self.planner.observe(plan, result)  # acceptance and costs
        self.scheduler.pace.observe(plan, result)
        self.when_stepped()
        return outputs

    def add(self, request: Generate, pictures: "PromptPictures | None" = None) -> None:
        """Queues a request's sequences; raises ``RequestError`` if it can never be served. ``pictures`` are
        what the target sees in the request's; unless they are given, it looks at them first."""
        if pictures is None and (seeing := self.admission.seeing(request, waits=False)) is not None:
            pictures = seeing.result()
        sequences = self.admission.sequences(request, pictures)
        longest = sequences[0].max_num_tokens - is_scored_alone(request.params)
        if not self.scheduler.can_ever_fit(longest):
            raise RequestError(
                "context_length_exceeded",
                f"{longest} tokens do not fit into the cache; lower max_tokens or raise cache_memory",
            )
        for sequence in sequences:
            self.scheduler.add(sequence)

    def load_adapter(self, name: str, path: str) -> Adapter:
        """Loads a LoRA adapter of the target; raises ``RequestError`` if that cannot be."""
        if self.admission.adapters is None:
            raise RequestError("unsupported_parameter", NO_ADAPTERS)
        return self.admission.adapters.load(name, path)

    def unload_adapter(self, digest: str) -> None:
        """Forgets an adapter once no sequence has it; an unknown one is ignored."""
        if self.admission.adapters is not None:
            self.admission.adapters.unload(digest)

    def free_unused(self) -> None:
        """Frees what sequences have left that have ended. Calls now and then are enough."""
        if self.admission.adapters is not None:
            self.admission.adapters.free_unused()

    def abort(self, request_id: str, index: int | None = None) -> None:
        """Forgets a request's sequences, or one of them; unknown ones are ignored."""
        self.scheduler.abort({request_id}, index)

    def abort_all(self, request_ids: Set[str]) -> None:
        """Forgets the sequences of these requests, as far as they are there."""
        self.scheduler.abort(request_ids)

    def reset(self) -> None:
        """Forgets all requests and what the caches hold: a step has not come to its end."""
        self.scheduler.reset()
        self.when_stepped()

    def forget_prefixes(self) -> Future[str] | None:
        """Forgets what earlier requests have left for later ones, in the caches at once, and in files: the
        result says why that could not be, and is empty once it is done. None where there are no files."""
        cleared = self.scheduler.forget_prefixes()
        if self.admission.vision is not None:
            self.admission.vision.forget()
        self.when_stepped()
        return cleared

    @property
    def has_work(self) -> bool:
        return bool(self.scheduler.running or self.scheduler.waiting)

    def speculation(self) -> dict[str, object]:
        """Returns how drafts are chosen, and why, for ``GET /speculation``."""
        return self.planner.state()

    def snapshot(self) -> Stats:
        """Returns counts since the start, and gauges as they are now."""
        stats, scheduler = self.stats, self.scheduler
        return Stats(
            num_running=len(scheduler.running),
            num_waiting=len(scheduler.waiting),
            num_speculative_tokens=self._num_speculative_tokens,
            cache_usage=scheduler.cache_usage(),
            num_preemptions=scheduler.num_preemptions,
            num_yields=scheduler.num_yields,
            num_prefix_queries=scheduler.num_prefix_queries,
            num_prefix_hits=scheduler.num_prefix_hits,
            drafts=stats.drafts,
            draft_tokens_per_position=stats.draft_tokens_per_position,
            accepted_tokens_per_position=stats.accepted_tokens_per_position,
            phase_seconds=dict(stats.phase_seconds),
            num_rows=dict(stats.num_rows),
            prefix_files=scheduler.prefix_file_stats(),
        )

    @property
    def _num_speculative_tokens(self) -> float:
        """Returns how many tokens a drafting sequence drafts per round: the configured number, or a mean."""
        if self.admission.method == "none":
            return 0
        if self.admission.num_speculative_tokens is not None:
            return self.admission.num_speculative_tokens
        return self.planner.num_speculative_tokens
