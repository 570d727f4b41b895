"""Keeps the LoRA adapters of a fused decoder, by the digest of their files and their numbers in passes.

An adapter that is unloaded stays until the last sequence that has it has ended.
"""

import logging
import weakref
from collections import deque

from truedraft.engine.config import EngineConfig, adapter_entry
from truedraft.engine.core.admission import RequestError
from truedraft.engine.core.sequence import Sequence as TokenSequence
from truedraft.engine.errors import ModelLoadError
from truedraft.engine.layers.adapters import Part, Place, part_of
from truedraft.engine.layers.linear import Linear
from truedraft.engine.messages import Adapter
from truedraft.engine.models.adapter_file import AdapterFile, read_adapter
from truedraft.engine.models.base import Model
from truedraft.engine.models.decoder import FusedDecoder

logger = logging.getLogger(__name__)


class AdapterTable:
    """Is ``Adapters`` of ``admission``, for a ``model`` whose passes take some."""

    def __init__(self, model: FusedDecoder, target: str, max_rank: int) -> None:
        self._layers = model.take_adapters()
        self._places = model.weights.places
        self._target, self._max_rank = target, max_rank
        self._number_of: dict[str, int] = {}  # digests are the keys
        self._num_users: dict[int, int] = {}
        self._retired: set[int] = set()
        self._ended: deque[int] = deque()  # the adapters of sequences that have ended
        self.named: list[Adapter] = []  # the settings name them

    @property
    def num_loaded(self) -> int:
        """Counts those that take memory, unloaded ones that are still in use included."""
        self.free_unused()
        return len(self._num_users)

    def load(self, name: str, path: str) -> Adapter:
        """Loads an adapter, unless it is there; raises ``RequestError`` if that cannot be."""
        self.free_unused()
        try:
            found = read_adapter(name, path, self._places, self._max_rank)
            if is_new := found.digest not in self._number_of:
                self._put(found)
        except ModelLoadError as error:
            raise RequestError("adapter_unavailable", str(error)) from error
        except (MemoryError, RuntimeError) as error:  # torch says so of memory
            words = f"the LoRA adapter {name} does not fit into the memory: {error}"
            raise RequestError("adapter_unavailable", words) from error
        if is_new:
            own, base = (each.rstrip("/").rpartition("/")[2].lower() for each in (self._target, found.base))
            if base and base not in own and own not in base:
                words = "its shapes fit, but if that is another model its answers mean nothing"
                logger.warning("The LoRA adapter %s was made for %s: %s", name, found.base, words)
        return Adapter(name, path, found.digest, found.rank)

    def unload(self, digest: str) -> None:
        number = self._number_of.pop(digest, None)
        if number is None:
            return
        self._retired.add(number)
        self.free_unused()
        self._free(number)

    def number_of(self, adapter: Adapter) -> int:
        if adapter.digest not in self._number_of:
            self._load_again(adapter)
        return self._number_of[adapter.digest]

    def _load_again(self, adapter: Adapter) -> None:
        """Loads an adapter for a request, whose client is not told where its files are."""
        known = set(self._number_of)
        try:
            digest = self.load(adapter.name, adapter.path).digest
        except RequestError as error:
            logger.warning("%s", error)
            digest = ""
        if digest != adapter.digest:
            if digest not in known:
                self.unload(digest)
            raise RequestError(
                "adapter_unavailable",
                f"the files of the LoRA adapter {adapter.name} are not those that were loaded: load it "
                "again by /v1/load_lora_adapter",
            )

    def keep_for(self, number: int, sequence: TokenSequence) -> None:
        self._num_users[number] += 1
        sequence.hold = hold = _Hold()
        # A sequence that was never scheduled may end in any thread: whoever lets go of it last does that.
        weakref.finalize(hold, self._ended.append, number).atexit = False

    def _put(self, found: AdapterFile) -> None:
        by_layer: dict[Linear, list[Part]] = {}
        for module, low in found.modules.items():
            of_layer: dict[Linear, list[Place]] = {}
            for place in self._places[module]:
                of_layer.setdefault(place.linear, []).append(place)
            for linear, places in of_layer.items():
                by_layer.setdefault(linear, []).append(part_of(low, places))
        number = next(n for n in range(len(self._num_users) + 1) if n not in self._num_users)
        self._layers.put(number, by_layer)
        self._number_of[found.digest], self._num_users[number] = number, 0

    def free_unused(self) -> None:
        while self._ended:
            number = self._ended.popleft()
            self._num_users[number] -= 1
            self._free(number)

    def _free(self, number: int) -> None:
        if number in self._retired and not self._num_users[number]:
            self._layers.drop(number)
            self._retired.remove(number)
            del self._num_users[number]


class _Hold:
    """Is what a sequence has of its adapter: it is gone when the sequence has ended."""


def load_adapters(model: Model, config: EngineConfig) -> AdapterTable | None:
    """Loads those that the settings name; None if there may be none. Raises ``ModelLoadError``."""
    if not config.takes_adapters:
        return None
    if not isinstance(model, FusedDecoder) or not model.weights.places or model.device.type != "cpu":
        if not config.lora_modules:
            return None
        where = "on a GPU" if model.device.type != "cpu" else f"by {model.way}"
        raise ModelLoadError(
            f"LoRA adapters need a model of a fused family (docs/models.md) on a CPU, and {config.target} is "
            f"served {where}: merge the adapter into its base, or leave out lora_modules"
        )
    assert config.target is not None
    table = AdapterTable(model, config.target, config.max_lora_rank)
    for entry in config.lora_modules:
        try:
            table.named.append(table.load(*adapter_entry(entry)))
        except RequestError as error:
            raise ModelLoadError(str(error)) from error
    return table
