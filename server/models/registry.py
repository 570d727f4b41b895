"""The registry knows all models of a server by the names that requests use."""

from collections.abc import Iterator, Sequence
from typing import NoReturn

from truedraft.engine.messages import Ready
from truedraft.server.errors import ModelNotFoundError
from truedraft.server.models.served import ServedModel


class Models:
    """Has one model or several; the first is meant where a probe names none."""

    def __init__(self, models: Sequence[ServedModel]) -> None:
        self._models = models
        self._by_name = {name: model for model in models for name in model.settings.served_names}

    def __iter__(self) -> Iterator[ServedModel]:
        return iter(self._models)

    @property
    def first(self) -> ServedModel:
        return self._models[0]

    @property
    def names(self) -> list[str]:
        """Returns all names, aliases included."""
        return [*self._by_name]

    def find(self, name: str) -> ServedModel:
        """Returns the model that is served by this name, or raises ``ModelNotFoundError``."""
        if (model := self._by_name.get(name)) is not None:
            return model
        raise ModelNotFoundError(
            f"The model '{name}' does not exist; this server has '{', '.join(self.names)}'.", param="model"
        )

    def start(self) -> None:
        for model in self._models:
            model.start()

    async def stop(self) -> None:
        for model in self._models:
            await model.stop()

    def abandon(self) -> None:
        """Fails every request that is still open."""
        for model in self._models:
            model.engine.abandon()

    async def wait_until_ready(self) -> Ready:
        """Waits for the first load; raises what it failed by."""
        return await self.first.wait_until_ready()

    async def wait_until_failed(self) -> NoReturn:
        """Raises ``WorkerFailedError`` once no further worker will be started."""
        await self.first.engine.wait_until_failed()
