"""The public Python API is here: generation in this process, without a server.

from truedraft import LLM, SamplingParams

llm = LLM()  # the bundled pair; or LLM("model.gguf"), LLM("folder-or-hub-id", draft="another")
for completion in llm.generate(["Once upon a time"], SamplingParams(max_tokens=100, seed=1)):
    print(completion.text)

What is imported from here is stable within a minor version; ``truedraft.engine`` and ``truedraft.server`` are
not. Names are imported when they are first used, since the server does without torch.
"""

from importlib import import_module
from typing import TYPE_CHECKING

from truedraft.server.version import package_version

if TYPE_CHECKING:
    from truedraft.engine.core.admission import RequestError
    from truedraft.engine.core.proposer import Observation, Proposer
    from truedraft.engine.errors import ConfigError, ModelLoadError
    from truedraft.engine.llm import LLM, Completion, Delta, SamplingParams
    from truedraft.engine.messages import TokenOutput
    from truedraft.engine.proposers.drawn import drawn_drafts
    from truedraft.engine.proposers.known import known_drafts
else:
    HOMES = {
        "LLM": "engine.llm",
        "Completion": "engine.llm",
        "ConfigError": "engine.errors",
        "Delta": "engine.llm",
        "ModelLoadError": "engine.errors",
        "Observation": "engine.core.proposer",
        "Proposer": "engine.core.proposer",
        "RequestError": "engine.core.admission",
        "SamplingParams": "engine.llm",
        "TokenOutput": "engine.messages",
        "drawn_drafts": "engine.proposers.drawn",
        "known_drafts": "engine.proposers.known",
    }

    def __getattr__(name: str) -> object:
        if name not in HOMES:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        return getattr(import_module(f"{__name__}.{HOMES[name]}"), name)

    def __dir__() -> list[str]:
        return __all__


__version__ = package_version()
__all__ = [
    "LLM",
    "Completion",
    "ConfigError",
    "Delta",
    "ModelLoadError",
    "Observation",
    "Proposer",
    "RequestError",
    "SamplingParams",
    "TokenOutput",
    "__version__",
    "drawn_drafts",
    "known_drafts",
]
