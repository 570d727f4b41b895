"""``/metrics`` shows this registry: families of the server, of each worker, and of their processes.

Labels that say whose a sample is are added when metrics are read, not for each token: the model's name, the
worker where there are several, the process. Built by ``server.observability.metrics``.
"""

from collections.abc import Callable, Iterator, Sequence

from prometheus_client import CollectorRegistry, Metric, ProcessCollector
from prometheus_client.registry import Collector


class LabelledRegistry(CollectorRegistry):
    """Reads ``server`` and ``workers``, with the label ``model_name`` on every sample."""

    def __init__(self, server: CollectorRegistry, workers: Sequence[Collector], model_name: str) -> None:
        super().__init__()
        self._server = server
        self._workers = workers
        self._model_name = model_name
        # Set by ``server.services``: each worker's process id; None while it has no process.
        self.worker_pids: Callable[[], Sequence[int | None]] = tuple

    def collect(self) -> Iterator[Metric]:
        families: dict[str, Metric] = {}
        for labels, collector in self._collectors():
            for family in collector.collect():
                known = families.setdefault(
                    family.name, Metric(family.name, family.documentation, family.type)
                )
                known.samples += [
                    sample._replace(labels={"model_name": self._model_name, **labels, **sample.labels})
                    for sample in family.samples
                ]
        yield from families.values()

    def _collectors(self) -> Iterator[tuple[dict[str, str], Collector | CollectorRegistry]]:
        yield {}, self._server
        for number, worker in enumerate(self._workers):
            yield self._worker_label(number), worker
        yield {"process": "server"}, _process("self")
        for number, pid in enumerate(self.worker_pids()):
            if pid is not None:
                yield {"process": "worker"} | self._worker_label(number), _process(pid)

    def _worker_label(self, number: int) -> dict[str, str]:
        return {"worker": str(number)} if len(self._workers) > 1 else {}


def _process(pid: int | str) -> ProcessCollector:
    return ProcessCollector(registry=None, pid=lambda: pid)
