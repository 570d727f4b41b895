"""The LoRA adapters of one served model: their names, and which of them requests use.

Requests name an adapter in ``model``, by its name or as ``model:adapter``. One that is unloaded or replaced
leaves the workers once the requests that use it have ended.
"""

import asyncio
from collections import Counter
from collections.abc import Callable, Collection

from truedraft.engine.config import adapter_entry, check_adapter_name
from truedraft.engine.messages import Adapter, Ready
from truedraft.server.errors import InvalidRequestError, ModelNotFoundError
from truedraft.server.settings import Settings
from truedraft.server.workers.worker_pool import WorkerPool


class ServedAdapters:
    """Has those of the settings from the begin, and knows their digests once a worker has told them."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        # An adapter of the settings is None until requests have loaded another one by its name.
        self._by_name: dict[str, Adapter | None] = dict.fromkeys(settings.adapter_names)
        self._paths = dict(map(adapter_entry, settings.lora_modules))
        self._num_uses: Counter[str] = Counter()  # digests are the keys
        self._in_use: Counter[str] = Counter()  # names are
        self._loading = asyncio.Lock()

    @property
    def names(self) -> list[str]:
        return list(self._by_name)

    @property
    def names_in_use(self) -> list[str]:
        return sorted(+self._in_use)

    def own_name(self, name: str) -> str | None:
        """Returns the adapter's own name if requests can mean one by ``name``."""
        base, _, own = name.rpartition(":")
        own = own if base in self._settings.served_names else name
        return own if own in self._by_name else None

    def path(self, name: str) -> str:
        found = self._by_name[name]
        return self._paths[name] if found is None else found.path

    def find(self, name: str, worker: Ready) -> Adapter:
        """Returns the adapter of that name, as the ``worker`` has it; raises ``ModelNotFoundError``."""
        found = self._by_name.get(name)
        if found is None and name in self._by_name:
            found = next((each for each in worker.adapters if each.name == name), None)
        if found is None:
            raise ModelNotFoundError(f"The LoRA adapter '{name}' does not exist.", param="model")
        return found

    def use(self, adapter: Adapter, engine: WorkerPool) -> Callable[[], None]:
        """Keeps the adapter until what is returned is called."""
        self._num_uses[adapter.digest] += 1
        self._in_use[adapter.name] += 1

        def give_back() -> None:
            self._num_uses[adapter.digest] -= 1
            self._in_use[adapter.name] -= 1
            self._unload_unused(adapter.digest, engine)

        return give_back

    async def load(
        self,
        name: str,
        path: str,
        engine: WorkerPool,
        taken: Callable[[], Collection[str]],
        *,
        replaces: bool,
    ) -> Adapter:
        """Has the workers load an adapter; ``taken`` returns the names of models and of other models'
        adapters. One of the same name is an error unless it ``replaces`` that."""
        try:
            check_adapter_name(name)
        except ValueError as error:
            raise InvalidRequestError(f"{error}.", param="lora_name") from None
        async with self._loading:
            before = self._by_name.get(name)
            if name in taken() or (name in self._by_name and not replaces):
                raise _taken(name)
            if name not in self._by_name and len(self._by_name) >= self._settings.max_loras:
                raise InvalidRequestError(
                    f"There are {len(self._by_name)} LoRA adapters, and max_loras is "
                    f"{self._settings.max_loras}: unload one first.",
                    param="lora_name",
                )
            if before is None and name in self._by_name:
                worker = engine.state.worker
                before = None if worker is None else self.find(name, worker)
            answers = await engine.load_adapter(name, path)
            loaded = {answer.digest: answer for answer in answers if isinstance(answer, Adapter)}
            failed = next((answer for answer in answers if isinstance(answer, BaseException)), None)
            if failed is None and len(loaded) > 1:
                failed = InvalidRequestError(
                    f"The files of {path} have changed while they were read: load the adapter again.",
                    param="lora_path",
                )
            if failed is None and name in taken():  # another model has got one of this name meanwhile
                failed = _taken(name)
            if failed is not None:
                for digest in loaded:
                    self._unload_unused(digest, engine)
                raise failed
            (found,) = loaded.values()
            self._by_name[name] = found
            if before is not None:
                self._unload_unused(before.digest, engine)
            return found

    def unload(self, name: str, engine: WorkerPool, worker: Ready) -> None:
        """Forgets a name; the workers forget the adapter once no request uses it."""
        found = self.find(name, worker)
        del self._by_name[name]
        self._unload_unused(found.digest, engine)

    def _unload_unused(self, digest: str, engine: WorkerPool) -> None:
        worker = engine.state.worker
        told = [] if worker is None else worker.adapters
        named = [each for each in self._by_name.values() if each is not None]
        named += [each for each in told if self._by_name.get(each.name, each) is None]
        if not self._num_uses[digest] and all(each.digest != digest for each in named):
            del self._num_uses[digest]
            engine.unload_adapter(digest)


def _taken(name: str) -> InvalidRequestError:
    return InvalidRequestError(
        f"There is a model or a LoRA adapter '{name}' already: choose another lora_name, or set "
        "load_inplace to replace an adapter.",
        param="lora_name",
    )
