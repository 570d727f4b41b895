"""Writes ``server/schemas/other_servers.json``: the fields that requests have on other servers.

python -m tools.other_servers           # downloads the newest releases and writes the file
python -m tools.other_servers --check   # fails if a release has names or values that the file lacks

Nothing is installed or imported: the classes are read with ``ast``, and C++ by its calls. The weekly job runs
it, so that ``server.schemas.unsupported_fields`` refuses by name what a peer has learned in the meantime.
"""

import argparse
import ast
import json
import re
import subprocess
import sys
import tarfile
import zipfile
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import NamedTuple

DATA = Path(__file__).parent.parent / "server" / "schemas" / "other_servers.json"

# Reads names out of the text of one file, each with the value that it has there if a request leaves it out.
Field = tuple[str, object]
Reader = Callable[[str], Iterable[Field]]


class Source(NamedTuple):
    """``files`` maps the end of a file's path in the package to what reads its names."""

    package: str
    files: Mapping[str, Reader]


def fields_of(*classes: str) -> Reader:
    """Returns a reader of the fields of classes, with those of their bases in the same file."""

    def read(text: str) -> Iterator[Field]:
        known = {node.name: node for node in ast.walk(ast.parse(text)) if isinstance(node, ast.ClassDef)}
        missing = set(classes) - known.keys()
        if missing:
            raise ValueError(f"there are no classes {sorted(missing)} any more")
        waiting = [*classes]
        while waiting:
            node = known[waiting.pop()]
            waiting += [base.id for base in node.bases if isinstance(base, ast.Name) and base.id in known]
            yield from _declared(node)

    return read


def _declared(node: ast.ClassDef) -> Iterator[Field]:
    for statement in node.body:
        if not isinstance(statement, ast.AnnAssign) or not isinstance(statement.target, ast.Name):
            continue
        if "ClassVar" in ast.unparse(statement.annotation) or statement.target.id.startswith("_"):
            continue
        call = (
            statement.value
            if isinstance(statement.value, ast.Call)
            else ast.Call(statement.annotation, [], [])
        )
        keywords = {keyword.arg: keyword.value for keyword in call.keywords}
        positional = call.args[0] if call.args else None
        value = keywords.get("default", positional) if call is statement.value else statement.value
        yield statement.target.id, _constant(value)
        for name in ("alias", "validation_alias"):
            if isinstance(alias := keywords.get(name), ast.Constant):
                yield str(alias.value), _constant(value)


def _constant(node: ast.expr | None) -> object:
    """Returns the value of a literal, and None for whatever has to be computed."""
    try:
        value: object = None if node is None else ast.literal_eval(node)
    except ValueError:
        return None
    return value if isinstance(value, bool | int | float | str) else None


def calls_with_names(pattern: str) -> Reader:
    """Returns a reader of the names that stand where the pattern's groups match; no values are read."""
    return lambda text: (
        (name, None) for match in re.finditer(pattern, text) for name in match.groups() if name
    )


SOURCES: Mapping[str, tuple[Source, ...]] = {
    "OpenAI": (
        Source(
            "openai",
            {
                "openai/types/chat/completion_create_params.py": fields_of("CompletionCreateParamsBase"),
                "openai/types/completion_create_params.py": fields_of("CompletionCreateParamsBase"),
                "openai/types/responses/response_create_params.py": fields_of("ResponseCreateParamsBase"),
            },
        ),
    ),
    "Anthropic": (
        Source(
            "anthropic", {"anthropic/types/message_create_params.py": fields_of("MessageCreateParamsBase")}
        ),
    ),
    "vLLM": (
        Source(
            "vllm",
            {
                "openai/chat_completion/protocol.py": fields_of("ChatCompletionRequest"),
                "openai/completion/protocol.py": fields_of("CompletionRequest"),
                "openai/responses/protocol.py": fields_of("ResponsesRequest"),
                "entrypoints/anthropic/protocol.py": fields_of("AnthropicMessagesRequest"),
            },
        ),
    ),
    "SGLang": (
        Source(
            "sglang",
            {
                "srt/entrypoints/openai/protocol.py": fields_of(
                    "ChatCompletionRequest", "CompletionRequest", "ResponsesRequest"
                ),
                "srt/sampling/sampling_params.py": fields_of("SamplingParams"),
            },
        ),
    ),
    "Ollama": (
        Source("ollama", {"ollama/_types.py": fields_of("Options", "ChatRequest", "GenerateRequest")}),
        Source(
            "sglang",
            {"entrypoints/ollama/protocol.py": fields_of("OllamaChatRequest", "OllamaGenerateRequest")},
        ),
    ),
    "llama.cpp": (
        Source(
            "llama-cpp-python",
            {
                "llama_cpp/server/types.py": fields_of(
                    "CreateCompletionRequest", "CreateChatCompletionRequest"
                ),
                "tools/server/server-schema.cpp": calls_with_names(
                    r'(?:new field_\w+|add_alias)\("(\w+)"|json_value\(data, "(\w+)"'
                ),
                "tools/server/server-common.cpp": calls_with_names(r'json_value\(body, "(\w+)"'),
            },
        ),
    ),
    "TGI": (
        Source(
            "huggingface-hub",
            {
                "_generated/types/text_generation.py": fields_of(
                    "TextGenerationInputGenerateParameters", "TextGenerationInput"
                ),
                "_generated/types/chat_completion.py": fields_of("ChatCompletionInput"),
            },
        ),
    ),
    "LMDeploy": (
        Source(
            "lmdeploy",
            {
                "serve/openai/protocol.py": fields_of(
                    "ChatCompletionRequest", "CompletionRequest", "GenerateReqInput"
                )
            },
        ),
    ),
    "MLX-LM": (Source("mlx-lm", {"mlx_lm/server.py": calls_with_names(r'self\.body\.get\(\s*"(\w+)"')}),),
    "transformers": (
        Source(
            "transformers",
            {"generation/configuration_utils.py": calls_with_names(r'self\.\w+ = kwargs\.pop\("([a-z]\w+)"')},
        ),
    ),
}


# What the vendors' own packages list: where the type is, and the names that lead to it.
ENUMERATIONS: Mapping[str, tuple[str, str, str]] = {
    "reasoning_effort": ("openai", "openai/types/shared/reasoning_effort.py", "ReasoningEffort"),
    "response_items": (
        "openai",
        "openai/types/responses/response_input_item_param.py",
        "ResponseInputItemParam",
    ),
    "chat_parts": (
        "openai",
        "openai/types/chat/chat_completion_content_part_param.py",
        "ChatCompletionContentPartParam",
    ),
    "chat_calls": (
        "openai",
        "openai/types/chat/chat_completion_message_tool_call_union_param.py",
        "ChatCompletionMessageToolCallUnionParam",
    ),
    "messages_blocks": ("anthropic", "anthropic/types/content_block_param.py", "ContentBlockParam"),
    "messages_results": ("anthropic", "anthropic/types/tool_result_block_param.py", "Content"),
    "messages_effort": ("anthropic", "anthropic/types/output_config_param.py", "OutputConfigParam.effort"),
    "messages_thinking": ("anthropic", "anthropic/types/thinking_config_param.py", "ThinkingConfigParam"),
}


class Package:
    """A wheel or an archive of sources, as its name and version and the texts of its files."""

    def __init__(self, archive: Path) -> None:
        self._archive = archive
        stem = archive.name.removesuffix(".tar.gz").removesuffix(".whl")
        self.version = stem.split("-")[1]
        self._is_wheel = archive.suffix == ".whl"
        with self._open() as opened:
            names = opened.namelist() if isinstance(opened, zipfile.ZipFile) else opened.getnames()
        self._names = names

    def read(self, end: str) -> str:
        """Returns the one file whose path ends with ``end``; the shortest path, where there are several."""
        found = sorted((name for name in self._names if f"/{name}".endswith(f"/{end}")), key=len)
        if not found:
            raise ValueError(f"{self._archive.name} has no {end} any more")
        with self._open() as opened:
            if isinstance(opened, zipfile.ZipFile):
                return opened.read(found[0]).decode()
            file = opened.extractfile(found[0])
            assert file is not None
            return file.read().decode()

    def _open(self) -> zipfile.ZipFile | tarfile.TarFile:
        return zipfile.ZipFile(self._archive) if self._is_wheel else tarfile.open(self._archive)


def listed(package: Package, path: str, name: str) -> list[str]:
    """Returns the strings of a literal type, or the types of all objects of a union, by following imports."""
    tree = ast.parse(package.read(path))
    name, _, field = name.partition(".")
    for node in tree.body:
        if isinstance(node, ast.ClassDef) and node.name == name:
            return _strings(_annotation(node, field or "type"))
        if isinstance(node, ast.AnnAssign) and ast.unparse(node.target) == name and node.value is not None:
            strings = _strings(node.value)
            members = [each.id for each in ast.walk(node.value) if isinstance(each, ast.Name)]
            inner = [listed(package, path, each) for each in members if each not in TYPING]
            return strings + [each for one in inner for each in one]
        if isinstance(node, ast.ImportFrom) and name in [alias.name for alias in node.names] and node.level:
            folder = "/".join(path.split("/")[: -node.level])
            return listed(package, f"{folder}/{(node.module or '').replace('.', '/')}.py", name)
    raise ValueError(f"{path} has no {name} any more")


TYPING = {"Union", "Optional", "Literal", "Annotated", "PropertyInfo", "List", "Iterable", "str", "None"}


def _annotation(node: ast.ClassDef, field: str) -> ast.expr:
    for statement in node.body:
        if isinstance(statement, ast.AnnAssign) and ast.unparse(statement.target) == field:
            return statement.annotation
    raise ValueError(f"{node.name} has no {field} any more")


def _strings(node: ast.expr) -> list[str]:
    return [
        each.value
        for each in ast.walk(node)
        if isinstance(each, ast.Constant) and isinstance(each.value, str)
    ]


def download(package: str, folder: Path) -> Package:
    """Takes a package's wheel, or its sources where there is none, without what it depends on."""
    for kind in ("--only-binary", "--no-binary"):
        place = folder / package / kind.strip("-")
        command = [
            sys.executable,
            "-m",
            "pip",
            "--quiet",
            "--disable-pip-version-check",
            "download",
            "--no-deps",
        ]
        done = subprocess.run([*command, kind, ":all:", "--dest", str(place), package], check=False)
        if done.returncode == 0:
            (archive,) = place.iterdir()
            return Package(archive)
    raise SystemExit(f"{package} cannot be downloaded")


def collect(packages: Mapping[str, Package]) -> dict[str, object]:
    """Returns the file's content: every list sorted, so that a new release shows as a small difference."""
    fields: dict[str, dict[str, object]] = {}
    for server, sources in SOURCES.items():
        names: dict[str, object] = {}
        for source in sources:
            for end, reader in source.files.items():
                found = [*reader(packages[source.package].read(end))]
                if not found:
                    raise ValueError(f"nothing was read from {end} of {source.package}")
                for name, value in found:
                    names[name] = names.get(name) if value is None else value
        fields[server] = dict(sorted(names.items()))
    enumerations = {
        name: sorted(set(listed(packages[package], path, of)))
        for name, (package, path, of) in ENUMERATIONS.items()
    }
    versions = {name: package.version for name, package in sorted(packages.items())}
    return {
        "written_by": "python -m tools.other_servers",
        "versions": versions,
        "fields": fields,
        "enumerations": enumerations,
    }


def differences(old: Mapping[str, object], new: Mapping[str, object]) -> list[str]:
    """Returns the names and values that ``new`` has and ``old`` lacks."""
    lines = []
    for part in ("fields", "enumerations"):
        known, found = old[part], new[part]
        assert isinstance(known, dict)
        assert isinstance(found, dict)
        for name, values in found.items():
            new_ones = [value for value in values if value not in known.get(name, [])]
            lines += [f"{part}: {name} has {value!r}" for value in new_ones]
    return lines


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--check", action="store_true", help="compare only")
    parser.add_argument("--packages", type=Path, help="folder of archives that were downloaded before")
    options = parser.parse_args(arguments)
    needed = {source.package for sources in SOURCES.values() for source in sources}
    needed |= {package for package, _, _ in ENUMERATIONS.values()}
    with TemporaryDirectory() as folder:
        packages = {}
        for name in sorted(needed):
            kept = [*options.packages.glob(f"{name.replace('-', '_')}-*")] if options.packages else []
            packages[name] = Package(kept[0]) if kept else download(name, Path(folder))
        new = collect(packages)
    if not options.check:
        DATA.write_text(json.dumps(new, indent=1) + "\n")
        return 0
    missing = differences(json.loads(DATA.read_text()), new)
    print("\n".join(missing) or "Nothing is new.")
    return 1 if missing else 0


if __name__ == "__main__":
    sys.exit(main())
