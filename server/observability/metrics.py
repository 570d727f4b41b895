"""Prometheus metrics: what requests experience, and what each worker reports.

The worker sends totals since its start; they are added up here as growth, so that a restarted worker does
not make a counter fall. Updated by ``server.workers`` and ``server.generation``, read by ``/metrics``.
"""

import math
import time
from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import accumulate
from typing import Any, get_args

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, Info, Metric
from prometheus_client.core import GaugeMetricFamily, HistogramMetricFamily, InfoMetricFamily
from prometheus_client.registry import Collector
from prometheus_client.utils import floatToGoString

from truedraft.engine.messages import FinishReason, PrefixFileStats, Ready, Source, Stats
from truedraft.server.errors import error_codes
from truedraft.server.observability.metrics_registry import LabelledModel, LabelledRegistry
from truedraft.server.observability.speculation_status import achieved_speedup
from truedraft.server.settings import DEFAULT_PREFIX, public_name
from truedraft.server.stages import STAGES, Stage, current_stages
from truedraft.server.text.choice import ChoiceDelta
from truedraft.server.version import package_version

LATENCY_BUCKETS = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10)
DURATION_BUCKETS = (*LATENCY_BUCKETS, 20, 50, 100, 200, 500)
TOKEN_BUCKETS = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10000, 20000, 50000, 100000)
RATE_BUCKETS = tuple(tenth / 10 for tenth in range(1, 11))

# Where the engine's time goes, as its ``Stats`` name it.
PHASES = ("draft", "score", "verify", "host")
# What may become of a piece of a text that was not kept, or not found, in ``prefix_cache_dir``.
DISK_ERRORS = ("damaged", "failed", "dropped")


class FrequentHistogram(Collector):
    """A histogram of what every token is observed by. Only the event loop's thread may use it: it does
    without the locks that one of the library takes for a sample."""

    def __init__(self, registry: CollectorRegistry, name: str, text: str, bounds: Sequence[float]) -> None:
        self._name = name
        self._text = text
        self._bounds = (*bounds, math.inf)
        self._counts = [0] * len(self._bounds)
        self._sum = 0.0
        registry.register(self)

    def observe(self, total: float, times: int) -> None:
        """Adds ``times`` samples that are equal, and ``total`` together."""
        if times:
            self._counts[bisect_left(self._bounds, total / times)] += times
            self._sum += total

    def collect(self) -> Iterator[Metric]:
        bounds = map(floatToGoString, self._bounds)
        counts = accumulate(self._counts)
        yield HistogramMetricFamily(
            self._name, self._text, buckets=[*zip(bounds, counts, strict=True)], sum_value=self._sum
        )


class ServerMetrics:
    """Families of the front end, whatever its models."""

    def __init__(self, registry: CollectorRegistry, prefix: str) -> None:
        def counter(name: str, text: str, labels: Sequence[str]) -> Counter:
            return Counter(f"{prefix}{name}", text, labels, registry=registry)

        def gauge(name: str, text: str) -> Gauge:
            return Gauge(f"{prefix}{name}", text, registry=registry)

        self.stages = Histogram(
            f"{prefix}request_stage_seconds",
            "What a stage of the front end took: body (until it is there), parse, turn (waiting for one), "
            "template, tokenize, grammar.",
            ["stage"],
            buckets=DURATION_BUCKETS,
            registry=registry,
        )
        self.http = counter("http_requests", "Answered HTTP requests.", ["route", "status"])
        self.errors = counter("request_errors", "Requests answered with an error.", ["code"])
        self.waiting_for_turn = gauge(
            "num_requests_waiting_for_turn", "Requests that wait for a thread of the front end."
        )
        self.connections = gauge("open_connections", "Connections that are open.")
        self.held_bytes = gauge("held_body_bytes", "Size of the bodies of all open requests.")
        self.loop_lag = Histogram(
            f"{prefix}event_loop_lag_seconds",
            "How late the front end's event loop was, ten samples a second: so long nothing was answered.",
            buckets=LATENCY_BUCKETS,
            registry=registry,
        )
        # A series that begins with its first event has no growth to see, and no alert for that event.
        for code in error_codes():
            self.errors.labels(code)
        for stage in STAGES:
            self.stages.labels(stage)

    def add_route(self, route: str, statuses: Iterable[int]) -> None:
        """Makes the series of a route's answers."""
        for status in statuses:
            self.http.labels(route, status)


class RequestMetrics:
    """Families of one model's requests and their tokens."""

    def __init__(self, registry: CollectorRegistry, prefix: str) -> None:
        def histogram(name: str, text: str, buckets: Sequence[float]) -> Histogram:
            return Histogram(f"{prefix}{name}", text, buckets=buckets, registry=registry)

        def counter(name: str, text: str, labels: Sequence[str] = ()) -> Counter:
            return Counter(f"{prefix}{name}", text, labels, registry=registry)

        def gauge(name: str, text: str) -> Gauge:
            return Gauge(f"{prefix}{name}", text, registry=registry)

        self.duration = histogram(
            "e2e_request_latency_seconds",
            "From the request's first byte to the last token.",
            DURATION_BUCKETS,
        )
        self.first_token = histogram(
            "time_to_first_token_seconds",
            "From the request's first byte to the first token.",
            DURATION_BUCKETS,
        )
        self.inter_token = FrequentHistogram(
            registry,
            f"{prefix}inter_token_latency_seconds",
            "Between tokens of a sequence, one sample a token.",
            LATENCY_BUCKETS,
        )
        self.round_interval = FrequentHistogram(
            registry,
            f"{prefix}round_interval_seconds",
            "Between rounds of a sequence, one sample a round.",
            LATENCY_BUCKETS,
        )
        self.queue_time = histogram(
            "request_queue_time_seconds",
            "From the worker's queue to a sequence's first step.",
            DURATION_BUCKETS,
        )
        self.prefill_time = histogram(
            "request_prefill_time_seconds", "From the first step to the first token.", DURATION_BUCKETS
        )
        self.decode_time = histogram(
            "request_decode_time_seconds", "From the first token to the last one.", DURATION_BUCKETS
        )
        self.prompt_size = histogram("request_prompt_tokens", "Prompt tokens per request.", TOKEN_BUCKETS)
        self.completion_size = histogram(
            "request_generation_tokens", "Generated tokens per request.", TOKEN_BUCKETS
        )
        self.acceptance_rate = histogram(
            "request_acceptance_rate", "Accepted per drafted token, per request that drafted.", RATE_BUCKETS
        )
        self.requests = counter("request_success", "Finished requests.", ["finished_reason"])
        self.aborted = counter("requests_aborted", "Requests that ended early.", ["reason"])
        self.prompt_tokens = counter("prompt_tokens", "Prompt tokens of submitted requests.")
        self.generation_tokens = counter("generation_tokens", "Generated tokens.")
        self.embedded_texts = counter("embedded_texts", "Texts and pairs whose vectors or scores were made.")
        self.running = gauge("num_requests_running", "Sequences that the workers compute.")
        self.waiting = gauge("num_requests_waiting", "Sequences in the workers' queues.")
        self.cache_usage = gauge(
            "kv_cache_usage_perc", "Share of cache blocks in use, 0 to 1, where it is largest."
        )
        self.ready = gauge("ready", "1 when a request can be taken.")
        self.loaded = gauge("model_loaded", "1 while the model is in memory, or is being loaded.")
        self.loads = counter("model_loads", "Times that the model has been loaded.")
        for reason in get_args(FinishReason):
            self.requests.labels(reason)
        for reason in ("disconnect", "timeout"):
            self.aborted.labels(reason)


class WorkerMetrics:
    """Families that mirror one worker's ``Stats``; observes it for ``server.workers.worker_client``.

    A worker sends its totals with every step; only the last ones before ``collect`` are counted.
    """

    def __init__(self, prefix: str = DEFAULT_PREFIX) -> None:
        self._registry = registry = CollectorRegistry()

        def counter(name: str, text: str, labels: Sequence[str] = ()) -> Counter:
            return Counter(f"{prefix}{name}", text, labels, registry=registry)

        def gauge(name: str, text: str, labels: Sequence[str] = ()) -> Gauge:
            return Gauge(f"{prefix}{name}", text, labels, registry=registry)

        method = ["method"]
        self._drafts = counter("spec_decode_num_drafts", "Rounds that drafted.", method)
        self._draft_tokens = counter("spec_decode_num_draft_tokens", "Drafted tokens.", method)
        self._accepted_tokens = counter("spec_decode_num_accepted_tokens", "Accepted tokens.", method)
        self._drafted_at = counter(
            "spec_decode_num_draft_tokens_per_pos", "Tokens drafted at a position.", ["position"]
        )
        self._accepted_at = counter(
            "spec_decode_num_accepted_tokens_per_pos", "Tokens accepted at a position.", ["position"]
        )
        self._preemptions = counter("num_preemptions", "Sequences put back to make room in the cache.")
        self._yields = counter("num_yields", "Sequences put back for an API key that had none running.")
        self._prefix_queries = counter(
            "prefix_cache_queries", "Prompt tokens that were looked up in the prefix cache."
        )
        self._prefix_hits = counter("prefix_cache_hits", "Of them, those that were found there.")
        self._disk_hits = counter(
            "prefix_cache_disk_hits", "Of those found, tokens that were read from prefix_cache_dir."
        )
        self._disk_bytes = gauge("prefix_cache_disk_bytes", "Bytes of all files below prefix_cache_dir.")
        self._disk_writing = gauge(
            "prefix_cache_disk_writing", "1 while prefix_cache_dir is written to, 0 without one or when full."
        )
        self._disk_seconds = counter(
            "prefix_cache_disk_read_seconds", "Time spent reading files of prefix_cache_dir."
        )
        self._disk_transfers = counter(
            "prefix_cache_disk_transferred_bytes", "Bytes read from prefix_cache_dir, and written.", ["way"]
        )
        self._disk_errors = counter(
            "prefix_cache_disk_errors",
            "Files of prefix_cache_dir that were damaged, reads and writes that failed, pieces not written.",
            ["reason"],
        )
        self._phase_seconds = counter("phase_seconds", "Time spent in each phase of a round.", ["phase"])
        self._rows = counter(
            "decoded_rows",
            "Rows of rounds by what ran them: c, cuda_graphs, or phases, which are slower.",
            ["runner"],
        )
        self._restarts = counter("worker_restarts", "Workers that died and were replaced.")
        self._ready = gauge("worker_ready", "1 while the worker takes part.")
        self._cache_usage = gauge(
            "worker_kv_cache_usage_perc", "Share of cache blocks in use, 0 to 1.", ["model"]
        )
        self._num_speculative_tokens = gauge("num_speculative_tokens", "Tokens drafted per round now.")
        self._estimated_speedup = gauge(
            "estimated_speedup", "Tokens per second over those without drafts; NaN where not estimated."
        )
        self._achieved_speedup = gauge(
            "achieved_speedup", "Speed-up measured over about the last fifty steps; NaN where it is not."
        )
        self._build = Info(f"{prefix}build", "Version and models.", registry=registry)
        self._totals: dict[tuple[Counter, tuple[str | int, ...]], float] = {}
        self._uncounted: Stats | None = None
        self.latest: Stats | None = None  # what a worker that lives has said last
        self.told: Ready | None = None
        self.speculation({})
        self._build.info({"version": package_version()})
        for phase in PHASES:
            self._phase_seconds.labels(phase)
        for way in ("read", "written"):
            self._disk_transfers.labels(way)
        for reason in DISK_ERRORS:
            self._disk_errors.labels(reason)
        for source in get_args(Source):
            if source != "none":
                for family in (self._drafts, self._draft_tokens, self._accepted_tokens):
                    family.labels(source)

    def collect(self) -> Iterator[Metric]:
        self._count()
        yield from self._registry.collect()

    def ready(self, ready: Ready) -> None:
        self._totals = {}
        self.told = ready
        self.speculation({})
        self._ready.set(1)
        self._build.info(
            {
                "version": package_version(),
                "target": public_name(ready.target),
                "draft": public_name(ready.draft) if ready.draft else "none",
                "device": ready.device,
                "dtype": ready.dtype,
            }
        )

    def lost(self) -> None:
        self.unloaded()
        self._restarts.inc()

    def unloaded(self) -> None:
        """The worker has ended, perhaps since it is not needed."""
        self._count()
        self.latest = self.told = None
        self._ready.set(0)
        self._disk_writing.set(0)
        self._cache_usage.clear()  # the cache went with the worker

    def speculation(self, state: Mapping[str, Any]) -> None:
        self._estimated_speedup.set(state.get("predicted_speedup", math.nan))
        achieved = achieved_speedup(state)
        self._achieved_speedup.set(math.nan if achieved is None else achieved)

    def stats(self, stats: Stats) -> None:
        self._uncounted = self.latest = stats

    def _count(self) -> None:
        stats, self._uncounted = self._uncounted, None
        if stats is None:
            return
        self._num_speculative_tokens.set(stats.num_speculative_tokens)
        for model, usage in stats.cache_usage.items():
            self._cache_usage.labels(model).set(usage)
        self._grow(self._preemptions, (), stats.num_preemptions)
        self._grow(self._yields, (), stats.num_yields)
        self._grow(self._prefix_queries, (), stats.num_prefix_queries)
        self._grow(self._prefix_hits, (), stats.num_prefix_hits)
        if stats.prefix_files is not None:
            self._count_files(stats.prefix_files)
        for method, counts in stats.drafts.items():
            self._grow(self._drafts, (method,), counts.num_drafts)
            self._grow(self._draft_tokens, (method,), counts.num_draft_tokens)
            self._grow(self._accepted_tokens, (method,), counts.num_accepted_tokens)
        self._grow_positions(self._drafted_at, stats.draft_tokens_per_position)
        self._grow_positions(self._accepted_at, stats.accepted_tokens_per_position)
        for runner, num_rows in stats.num_rows.items():
            self._grow(self._rows, (runner,), num_rows)
        for phase, seconds in stats.phase_seconds.items():
            self._grow(self._phase_seconds, (phase,), seconds)

    def _count_files(self, files: PrefixFileStats) -> None:
        self._disk_bytes.set(files.num_bytes)
        self._disk_writing.set(files.is_writing)
        self._grow(self._disk_hits, (), files.num_hits)
        self._grow(self._disk_seconds, (), files.read_seconds)
        self._grow(self._disk_transfers, ("read",), files.read_bytes)
        self._grow(self._disk_transfers, ("written",), files.written_bytes)
        for reason, number in zip(
            DISK_ERRORS, (files.num_damaged, files.num_failures, files.num_dropped), strict=True
        ):
            self._grow(self._disk_errors, (reason,), number)

    def _grow_positions(self, counter: Counter, totals: Sequence[int]) -> None:
        for position, total in enumerate(totals):
            if total:  # the worker reports every position it could draft; most are never reached
                self._grow(counter, (position,), total)

    def _grow(self, counter: Counter, labels: tuple[str | int, ...], total: float) -> None:
        """Add what this worker's total has grown by since it was last counted; most have not grown."""
        known = self._totals.get((counter, labels))
        if known == total:
            return
        growing = counter.labels(*labels) if labels else counter
        growing.inc(max(0.0, total - (known or 0.0)))
        self._totals[counter, labels] = total


class _CacheConfig(Collector):
    """Says the sizes of the caches, by which gateways guess what a server still holds of earlier prompts."""

    def __init__(self, prefix: str, workers: Sequence[WorkerMetrics]) -> None:
        self._name = f"{prefix}cache_config"
        self._workers = workers

    def collect(self) -> Iterator[Metric]:
        told = [worker.told for worker in self._workers if worker.told is not None]
        family = InfoMetricFamily(self._name, "Tokens of a cache block, and blocks of all workers together.")
        if told:
            num_blocks = sum(ready.num_target_blocks for ready in told)
            sizes = {"block_size": str(told[0].block_size), "num_gpu_blocks": str(num_blocks)}
            family.add_metric([], sizes)
        yield family


class _Adapters(Collector):
    """Says which LoRA adapters requests use, as vLLM's metric of the same name does."""

    def __init__(self, prefix: str) -> None:
        self._name = f"{prefix}lora_requests_info"
        self.max_loras = 0
        self.names_in_use: Callable[[], list[str]] = list

    def collect(self) -> Iterator[Metric]:
        family = GaugeMetricFamily(
            self._name,
            "When this was read, with the LoRA adapters that requests use.",
            labels=["max_lora", "running_lora_adapters", "waiting_lora_adapters"],
        )
        if self.max_loras:
            # Requests of the worker's queue are counted with those that run.
            family.add_metric([str(self.max_loras), ",".join(self.names_in_use()), ""], time.time())
        yield family


class ModelMetrics:
    """Metrics of one model: of its requests and of its workers."""

    def __init__(self, prefix: str, num_workers: int) -> None:
        registry = CollectorRegistry()
        self.requests = requests = RequestMetrics(registry, prefix)
        self.workers = [WorkerMetrics(prefix) for _ in range(num_workers)]
        requests.running.set_function(lambda: sum(stats.num_running for stats in self._latest()))
        requests.waiting.set_function(lambda: sum(stats.num_waiting for stats in self._latest()))
        requests.cache_usage.set_function(self._cache_usage)
        registry.register(_CacheConfig(prefix, self.workers))
        self.adapters = _Adapters(prefix)
        registry.register(self.adapters)
        self.labelled = LabelledModel(registry, self.workers)

    def _latest(self) -> Iterator[Stats]:
        """Yields what each worker that lives has said at the end of its last step."""
        yield from (worker.latest for worker in self.workers if worker.latest is not None)

    def _cache_usage(self) -> float:
        """Returns that of the fullest cache, since a gateway takes one number for the whole server."""
        return max((max(stats.cache_usage.values(), default=0.0) for stats in self._latest()), default=0.0)


class Metrics:
    """All metrics of one server; ``exposed`` is what ``/metrics`` reads. ``num_workers`` has one number for
    each model, by its name."""

    def __init__(self, prefix: str = DEFAULT_PREFIX, num_workers: Mapping[str, int] | None = None) -> None:
        registry = CollectorRegistry()
        self.server = ServerMetrics(registry, prefix)
        numbers = num_workers or {"": 1}
        self.models = {name: ModelMetrics(prefix, number) for name, number in numbers.items()}
        self.exposed = LabelledRegistry(
            registry, {name: metrics.labelled for name, metrics in self.models.items()}
        )

    def count_error(self, code: str) -> None:
        self.server.errors.labels(code).inc()

    def observe_stage(self, stage: Stage, seconds: float) -> None:
        self.server.stages.labels(stage).observe(seconds)

    def count_answer(self, route: str, status: int) -> None:
        self.server.http.labels(route, status).inc()


class RequestTimer:
    """Observes one HTTP request from its first byte to its end."""

    def __init__(self, metrics: RequestMetrics, num_prompt_tokens: int) -> None:
        self._metrics = metrics
        self._arrived = current_stages().arrived
        self._submitted = self._arrived
        self._last_output: dict[int, float] = {}  # choice -> time of its last round
        self._num_prompt_tokens = num_prompt_tokens
        self._num_tokens = 0
        self.first_token_seconds: float | None = None
        self.queue_seconds: float | None = None  # the wait of the first choice to get a token

    def submitted(self) -> None:
        self._submitted = time.perf_counter()
        self._metrics.prompt_tokens.inc(self._num_prompt_tokens)
        self._metrics.prompt_size.observe(self._num_prompt_tokens)

    def output(self, delta: ChoiceDelta, queue_seconds: float | None) -> None:
        """Rounds that came together share the time since the last ones, and so do their tokens.

        A choice's first output tells how long it had waited.
        """
        now = time.perf_counter()
        num_tokens = len(delta.token_ids)
        if queue_seconds is not None:
            self._metrics.queue_time.observe(queue_seconds)
        if not self._last_output:
            self.first_token_seconds = now - self._arrived
            self.queue_seconds = queue_seconds
            self._metrics.first_token.observe(self.first_token_seconds)
            in_engine = now - self._submitted
            self._metrics.prefill_time.observe(max(0.0, in_engine - (queue_seconds or 0.0)))
        if (previous := self._last_output.get(delta.index)) is not None:
            self._metrics.round_interval.observe(now - previous, delta.num_rounds)
            self._metrics.inter_token.observe(now - previous, num_tokens)
        self._last_output[delta.index] = now
        self._num_tokens += num_tokens
        self._metrics.generation_tokens.inc(num_tokens)

    def finished(self, finish_reason: FinishReason, num_drafted: int, num_accepted: int) -> None:
        self._metrics.requests.labels(finish_reason).inc()
        seconds = self.seconds
        self._metrics.duration.observe(seconds)
        self._metrics.decode_time.observe(seconds - (self.first_token_seconds or 0.0))
        self._metrics.completion_size.observe(self._num_tokens)
        if num_drafted:
            self._metrics.acceptance_rate.observe(num_accepted / num_drafted)

    @property
    def seconds(self) -> float:
        """Since the request's first byte."""
        return time.perf_counter() - self._arrived

    @property
    def prepared_seconds(self) -> float:
        """Returns the time from the first byte until the engine got the request."""
        return self._submitted - self._arrived

    def aborted(self, reason: str) -> None:
        self._metrics.aborted.labels(reason).inc()
