"""What ``/metrics`` shows: the server's own families, each sample with the model's name, and both processes'.

The name is added when metrics are read, not for each token. Built by ``server.metrics``.
"""

from collections.abc import Callable, Iterator

from prometheus_client import CollectorRegistry, Metric, ProcessCollector


class LabelledRegistry(CollectorRegistry):
    """Reads ``inner`` with the label ``model_name`` on every sample, and ``process_*`` of two processes."""

    def __init__(self, inner: CollectorRegistry, model_name: str) -> None:
        super().__init__()
        self._inner = inner
        self._model_name = model_name
        # Set by ``server.services``: the worker's process id; None while there is no worker.
        self.worker_pid: Callable[[], int | None] = lambda: None

    def collect(self) -> Iterator[Metric]:
        for family in [*self._inner.collect(), *self._processes()]:
            family.samples = [
                sample._replace(labels={"model_name": self._model_name, **sample.labels})
                for sample in family.samples
            ]
            yield family

    def _processes(self) -> list[Metric]:
        """The families of ``ProcessCollector`` once, with a label for the process."""
        families: dict[str, Metric] = {}
        for process, pid in (("server", "self"), ("worker", self.worker_pid())):
            if pid is None:
                continue
            collector = ProcessCollector(registry=None, pid=lambda pid=pid: pid)  # type: ignore[misc]
            for family in collector.collect():
                known = families.setdefault(
                    family.name, Metric(family.name, family.documentation, family.type)
                )
                known.samples += [
                    sample._replace(labels={"process": process, **sample.labels}) for sample in family.samples
                ]
        return list(families.values())
