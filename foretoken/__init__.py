"""The public Python API: generation in this process, without a server.

from foretoken import LLM, SamplingParams

llm = LLM()  # the bundled pair; or LLM(target="path", draft="path")
for completion in llm.generate(["Once upon a time"], SamplingParams(max_tokens=100, seed=1)):
    print(completion.text)

What is imported from here is stable within a minor version; the packages ``engine`` and ``server`` are not.
"""

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
