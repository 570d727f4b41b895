"""The public Python API: generation in this process, without a server.

from foretoken import LLM, SamplingParams

llm = LLM()  # the bundled pair; or LLM(target="path", draft="path")
for completion in llm.generate(["Once upon a time"], SamplingParams(max_tokens=100, seed=1)):
    print(completion.text)

What is imported from here is stable within a minor version; the packages ``engine`` and ``server`` are not.
"""

import sys
from importlib.machinery import PathFinder
from importlib.util import module_from_spec
from os.path import samefile
from pathlib import Path


def _import_beside_this(name: str) -> None:
    """Import a package of ours, whatever the folder of the user's script has under its name.

    ``ImportError`` if the script has imported that already: there is one module of a name.
    """
    spec = PathFinder.find_spec(name, [str(Path(__file__).parent.parent)])
    assert spec is not None
    assert spec.loader is not None
    known = sys.modules.get(name)
    if known is None:
        sys.modules[name] = module_from_spec(spec)
        spec.loader.exec_module(sys.modules[name])
    elif not known.__file__ or not samefile(known.__file__, str(spec.origin)):
        raise ImportError(f"foretoken needs the module name {name!r}, which {known.__file__} has taken")


for _name in ("engine", "server"):
    _import_beside_this(_name)

# ruff: noqa: E402
from engine.core.admission import RequestError
from engine.llm import LLM, Completion
from engine.messages import SamplingParams, TokenOutput
from engine.models.errors import ModelLoadError
from server.version import package_version

__version__ = package_version()
__all__ = [
    "LLM",
    "Completion",
    "ModelLoadError",
    "RequestError",
    "SamplingParams",
    "TokenOutput",
    "__version__",
]
