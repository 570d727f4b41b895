"""``/metrics`` shows this registry: families of the server, of each model and worker, and of their processes.

Labels that say whose a sample is are added when metrics are read, not for each token: the model's name, the
worker where there are several, the process. Built by ``server.observability.metrics``.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence

from prometheus_client import CollectorRegistry, Metric, ProcessCollector
from prometheus_client.registry import Collector

Labelled = tuple[dict[str, str], Collector | CollectorRegistry]


class LabelledModel:
    """One model's families, those of its workers and of their processes."""

    def __init__(self, requests: CollectorRegistry, workers: Sequence[Collector]) -> None:
        self.requests = requests
        self.workers = workers
        # Set by ``server.models``: each worker's process id; None while it has no process.
        self.worker_pids: Callable[[], Sequence[int | None]] = tuple

    def worker_collectors(self) -> Iterator[Labelled]:
        for number, worker in enumerate(self.workers):
            yield self._worker_label(number), worker

    def process_collectors(self) -> Iterator[Labelled]:
        for number, pid in enumerate(self.worker_pids()):
            if pid is not None:
                yield {"process": "worker"} | self._worker_label(number), _process(pid)

    def _worker_label(self, number: int) -> dict[str, str]:
        return {"worker": str(number)} if len(self.workers) > 1 else {}


class LabelledRegistry(CollectorRegistry):
    """Reads ``server`` and ``models``, whose samples have the label ``model_name``. The server's own samples
    have it, too, if there is one model."""

    def __init__(self, server: CollectorRegistry, models: Mapping[str, LabelledModel]) -> None:
        super().__init__()
        self._server = server
        self._models = models

    def collect(self) -> Iterator[Metric]:
        families: dict[str, Metric] = {}
        for labels, collector in self._collectors():
            for family in collector.collect():
                known = families.setdefault(
                    family.name, Metric(family.name, family.documentation, family.type)
                )
                known.samples += [
                    sample._replace(labels={**labels, **sample.labels}) for sample in family.samples
                ]
        yield from families.values()

    def _collectors(self) -> Iterator[Labelled]:
        own = {"model_name": next(iter(self._models))} if len(self._models) == 1 else {}
        named = [({"model_name": name}, model) for name, model in self._models.items()]
        yield own, self._server
        for name, model in named:
            yield name, model.requests
        for name, model in named:
            yield from ((name | labels, worker) for labels, worker in model.worker_collectors())
        yield own | {"process": "server"}, _process("self")
        for name, model in named:
            yield from ((name | labels, process) for labels, process in model.process_collectors())


def _process(pid: int | str) -> ProcessCollector:
    return ProcessCollector(registry=None, pid=lambda: pid)
