"""House rules as tests: who may import whom, how long a file may be, what every module must have."""

import ast
import re
import subprocess
import sys
import tomllib
from collections.abc import Callable, Iterator
from functools import cache
from graphlib import TopologicalSorter
from pathlib import Path
from types import FrameType

import pytest

from tests.models import run_engine
from truedraft.engine.build import build_engine
from truedraft.engine.config import BUNDLED_PAIR, EngineConfig
from truedraft.engine.messages import SamplingParams

ROOT = Path(__file__).parent.parent
PRODUCT = ("truedraft", "server", "engine", "loadtest", "benchmarks", "tools")
FOLDERS = ("engine", "server", "loadtest")  # importable as truedraft.engine, truedraft.server, ...
MAX_LINES = 600

# Subcommands that run the engine in the terminal's process; each import waits until it is asked for.
COMMANDS = (
    "engine.commands.about",
    "engine.commands.chat",
    "engine.commands.check",
    "engine.commands.generate",
    "engine.commands.models",
    "engine.commands.train_draft",
    "engine.commands.verify_trace",
)

# What both processes share: messages, settings, how the worker's life is tied to the front end's, and how
# commands print.
BORDER = (
    "engine.messages",
    "engine.config",
    "engine.config_errors",
    "engine.errors",
    "engine.parameters",
    "engine.machine.deep_stack",
    "engine.sampling.grammar_compiler",
    "engine.machine.lifeline",
    "engine.machine.heap",
    "engine.machine.limits",
    "engine.machine.openmp",
    "engine.terminal",
    "engine.text.abandoned",
    "engine.text.detokenizer",
    "engine.text.schema",
    "engine.text.stop_strings",
    "engine.text.text_stream",
    "engine.text.vocabulary",
    "engine.formats.gguf_file",
    "engine.formats.gguf_tokenizer",
    "engine.formats.pretrained_tokenizer",
    "engine.commands.options",
    "engine.hub.fetch",
    "engine.hub.fetch_bar",
    "engine.hub.folders",
    "engine.hub.located",
    "engine.hub.names",
)

# Scheduling and speculation are bookkeeping with plain integers: testable, and readable, without tensors.
TORCH_FREE = (
    *BORDER,
    "engine.process.connection",
    "engine.process.spawned",
    "engine.core.engine",
    "engine.core.scheduler",
    "engine.core.commit",
    "engine.speculation.planner",
)

# Engine and server are a staircase each: a room imports rooms of lower floors, and nothing else. Rooms of one
# floor do not know each other. A module next to the rooms is a room of its own.
FLOORS = {
    "engine": (
        {"errors", "config_errors", "machine", "formats", "parameters", "terminal", "text"},
        {"messages"},
        {"config"},
        {"hub"},
        {"memory", "parallel"},
        {"rows", "kv_events"},
        {"layers", "sampling"},
        {"core", "native", "cuda"},
        {"checkpoints", "speculation"},
        {"families"},
        {"gguf"},
        {"models"},
        {"proposers", "rounds.capture", "embedding"},
        {"proposers.translated", "rounds"},
        {"build"},
        {"library", "process"},
        {"llm"},
        {"training"},
        {"commands"},
    ),
    "server": (
        {"entries"},
        {"errors", "settings", "version"},
        {"leniency", "stages", "turns"},
        {"schemas"},
        {"text"},
        {"observability"},
        {"workers", "http"},
        {"generation", "models"},
        {"services"},
        {"routes"},
        {"app"},
        {"cli"},
        {"ray_serve"},
    ),
}

# torch, numpy and arrays say by these where their numbers are.
ADDRESSES = {"data_ptr", "const_data_ptr", "ctypes", "__array_interface__", "__dlpack__", "buffer_info"}


# Numbers that may only fall: who makes one smaller writes it here.
SAMPLING_PARAMETERS = (
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "presence_penalty",
    "frequency_penalty",
    "repetition_penalty",
)
MOST_FILES_WITH_PARAMETERS = 11
MOST_FILES_OF_A_REQUEST = 24
MOST_LINES_OF_C = 79
# What a comment says of numbers that are copied from a file of another language.
COPIED = re.compile(r"(\bAs in|These are as in|[;,] as in|in the order of|numbered as in) \w+\.(h|c|py|js)\b")


def product_files() -> list[Path]:
    """Returns the product's source files, whatever their language."""
    folders = ("engine", "server", "loadtest", "truedraft")
    found = (path for folder in folders for path in (ROOT / folder).rglob("*"))
    kinds = {".py", ".c", ".h", ".js", ".html"}
    links = {ROOT / "truedraft" / folder for folder in FOLDERS}
    return sorted(path for path in found if path.suffix in kinds and not links & {*path.parents})


def modules(*packages: str) -> list[Path]:
    return sorted(path for package in packages for path in (ROOT / package).rglob("*.py"))


@cache
def tree_of(path: Path) -> ast.Module:
    return ast.parse(path.read_text())


def every_file_of(*packages: str) -> Callable[[Callable[[Path], None]], Callable[[], None]]:
    """Makes one test of a check for each file, which names all files that fail: there are hundreds."""

    def decorate(check: Callable[[Path], None]) -> Callable[[], None]:
        def test() -> None:
            failures = []
            for path in modules(*packages):
                try:
                    check(path)
                except AssertionError as error:
                    failures.append(str(error).splitlines()[0])
            assert not failures, "\n".join(failures)

        test.__doc__ = check.__doc__
        return test

    return decorate


def name_of(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


def imports(tree: ast.Module, package: str) -> Iterator[tuple[str, bool]]:
    """Every imported module, by its path in the repository, and whether the import waits in a function.

    ``truedraft.engine`` is the folder ``engine``: the package has links to the folders.
    """
    for node, is_lazy in _nodes(tree, is_lazy=False):
        if isinstance(node, ast.Import):
            yield from ((alias.name.removeprefix("truedraft."), is_lazy) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            parents = package.split(".")[: len(package.split(".")) - node.level + 1] if node.level else []
            module = ".".join([*parents, *([node.module] if node.module else [])])
            module = module.removeprefix("truedraft.")
            yield module, is_lazy
            # `from truedraft.engine import worker` imports engine.worker, whatever it looks like.
            if module in PRODUCT:
                yield from ((f"{module}.{alias.name}", is_lazy) for alias in node.names)
        elif isinstance(node, ast.Call) and (name := _imported_by_string(node)) is not None:
            yield name.removeprefix("truedraft."), is_lazy


def _nodes(tree: ast.AST, is_lazy: bool) -> Iterator[tuple[ast.AST, bool]]:
    """Yields all nodes, and whether each is in a function."""
    for node in ast.iter_child_nodes(tree):
        yield node, is_lazy
        yield from _nodes(node, is_lazy or isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef))


def _imported_by_string(call: ast.Call) -> str | None:
    """Returns the module that ``import_module("...")`` imports, if a constant says which."""
    function = call.func
    called = function.attr if isinstance(function, ast.Attribute) else getattr(function, "id", None)
    if called not in ("import_module", "__import__") or not call.args:
        return None
    (first, *_) = call.args
    return first.value if isinstance(first, ast.Constant) and isinstance(first.value, str) else None


@cache
def imports_of(path: Path) -> list[tuple[str, bool]]:
    package = ".".join(path.relative_to(ROOT).parent.parts)
    return list(imports(tree_of(path), package))


def is_within(module: str, packages: tuple[str, ...]) -> bool:
    return any(module == package or module.startswith(f"{package}.") for package in packages)


@every_file_of("server")
def test_server_sees_only_the_border_of_the_engine(path: Path) -> None:
    for module, lazy in imports_of(path):
        assert not is_within(module, ("torch",)), f"{name_of(path)} imports {module}"
        if module.split(".")[0] != "engine" or module == "engine":
            continue
        command = name_of(path) == "server/cli/main.py" and lazy and is_within(module, COMMANDS)
        allowed = is_within(module, BORDER) or command
        assert allowed, f"{name_of(path)} imports {module}"


def test_few_files_name_many_sampling_parameters() -> None:
    """A parameter should enter a batch at one place. The number may only fall."""
    naming = []
    for path in product_files():
        text = path.read_text().lower()
        if "written by" in text.partition("\n")[0]:
            continue  # it derives from another file, and nobody writes into it
        if sum(bool(re.search(rf"\b{name}\b", text)) for name in SAMPLING_PARAMETERS) >= 4:
            naming.append(name_of(path))
    assert len(naming) <= MOST_FILES_WITH_PARAMETERS, "\n".join(naming)


def test_few_files_are_entered_by_a_greedy_request() -> None:
    """Counts the engine's files that run for a request of the bundled pair, once it has been warmed up. The
    number may only fall."""
    draft, target = (str(BUNDLED_PAIR / name) for name in ("draft", "target"))
    core = build_engine(EngineConfig(target=target, draft=draft, device="cpu"))
    params = SamplingParams(max_tokens=64, temperature=0, ignore_eos=True)
    for _ in range(4):
        run_engine(core, [[1, 2, 3, 4, 5]], params)
    # What is drafted, and so what runs, may depend on measured times: the fewest of some requests count.
    entered = min((_files_entered(lambda: run_engine(core, [[1, 2, 3]], params)) for _ in range(3)), key=len)
    assert len(entered) <= MOST_FILES_OF_A_REQUEST, "\n".join(sorted(entered))
    assert {"core/engine.py", "core/scheduler.py"} <= entered


def _files_entered(run: Callable[[], object]) -> set[str]:
    entered: set[str] = set()
    engine = str(Path(sys.modules[build_engine.__module__].__file__ or "").parent)

    def note(frame: FrameType, event: str, _: object) -> None:
        name = frame.f_code.co_filename
        if event == "call" and name.startswith(engine):
            entered.add(Path(name).relative_to(engine).as_posix())

    sys.setprofile(note)
    try:
        run()
    finally:
        sys.setprofile(None)
    return entered


def test_no_enumeration_is_copied_by_hand() -> None:
    """Numbers that two languages share are written from one (``make written``)."""
    copied = [
        f"{name_of(path)}: {found[0]}"
        for path in product_files()
        for found in COPIED.finditer(path.read_text())
    ]
    assert not copied, "\n".join(copied)


@pytest.mark.parametrize(
    "comment",
    ["# These are as in kernels.h.", "/* As in random.py. */", "# Stand in the order of kernels.h."],
)
def test_copies_are_found(comment: str) -> None:
    assert COPIED.search(comment)
    assert not COPIED.search("# ``shared.h`` is written from here.")


@every_file_of(*PRODUCT, "tests")
def test_ours_are_imported_by_the_name_of_the_package(path: Path) -> None:
    """A checkout's root makes ``engine`` importable: a second copy of each module, with its own state."""
    for statement in ast.walk(tree_of(path)):
        names = [alias.name for alias in statement.names] if isinstance(statement, ast.Import) else []
        if isinstance(statement, ast.ImportFrom) and not statement.level:
            names = [statement.module or ""]
        wrong = [name for name in names if is_within(name, FOLDERS)]
        assert not wrong, f"{name_of(path)} imports {wrong}"


@every_file_of("engine")
def test_engine_knows_nothing_of_http(path: Path) -> None:
    for module, _ in imports_of(path):
        forbidden = is_within(module, ("fastapi", "starlette", "uvicorn", "server"))
        assert not forbidden, f"{name_of(path)} imports {module}"


@every_file_of("loadtest")
def test_the_load_generator_knows_no_server_of_ours(path: Path) -> None:
    """It prints as all commands do, and that is all."""
    for module, _ in imports_of(path):
        assert module == "engine.terminal" or not is_within(module, ("server", "engine", "torch")), (
            f"{name_of(path)} imports {module}"
        )


def room_of(module: str) -> str | None:
    """Returns the room on ``FLOORS`` of a module of engine or server; None if it is in none of them."""
    folder, _, name = module.partition(".")
    rooms = [room for floor in FLOORS[folder] for room in floor if is_within(name, (room,))]
    return max(rooms, key=len, default=None)


@every_file_of(*FLOORS)
def test_engine_and_server_are_a_staircase_each(path: Path) -> None:
    """Imports for types alone count, too."""
    if path.name == "__init__.py":
        return
    folder, *_ = path.relative_to(ROOT).parts
    here = room_of(".".join(path.relative_to(ROOT).with_suffix("").parts))
    assert here is not None, f"{name_of(path)} is on none of the floors"
    height = {room: number for number, floor in enumerate(FLOORS[folder]) for room in floor}
    for module, _ in imports_of(path):
        if module.startswith(f"{folder}."):
            there = room_of(module)
            downwards = there is not None and (there == here or height[there] < height[here])
            assert downwards, f"{name_of(path)} imports {module}"


@pytest.mark.parametrize("folder", FLOORS)
def test_no_import_cycles(folder: str) -> None:
    """Imports that wait inside functions count, and so do those for types alone."""
    names = {".".join(path.relative_to(ROOT).with_suffix("").parts): path for path in modules(folder)}
    left = {}
    for name, path in names.items():
        left[name] = {module for module, _ in imports_of(path) if module in names and module != name}
    while leaves := [name for name, needed in left.items() if not needed & left.keys()]:
        for name in leaves:
            del left[name]
    assert not left


def test_c_files_do_not_call_each_other_in_circles() -> None:
    files = {path.stem: path.read_text() for path in (ROOT / "engine" / "native").glob("*.c")}
    code = {name: re.sub(r"/\*.*?\*/", "", text, flags=re.DOTALL) for name, text in files.items()}
    defined = re.compile(r"^(?!static)[a-z]\w* \*?(\w+)\([^;]*?\{$", re.MULTILINE | re.DOTALL)
    home = {function: name for name, text in code.items() for function in defined.findall(text)}
    calls = {
        name: {home[word] for word in re.findall(r"\w+", text) if word in home} - {name}
        for name, text in code.items()
    }
    assert {"decoder", "ops", "threads"} <= calls["rounds"]
    assert {"sampling", "threads"} <= calls["ops"]
    TopologicalSorter(calls).prepare()  # raises CycleError


def functions_of_c(text: str) -> Iterator[tuple[str, int]]:
    """Yields the functions of a file in C, each with its number of lines: they begin at the margin."""
    begun: int | None = None
    lines = text.splitlines()
    for number, line in enumerate(lines):
        if re.match(r"[a-zA-Z_][^;=]*\(", line):
            begun = number
        elif line.startswith("}") and begun is not None:
            yield lines[begun], number - begun + 1
            begun = None


def test_functions_of_c_are_short() -> None:
    """The number may only fall. ruff bounds the complexity of Python's functions."""
    sizes = {
        (name_of(path), name): size
        for path in (ROOT / "engine" / "native").glob("*.[ch]")
        for name, size in functions_of_c(path.read_text())
    }
    assert len(sizes) > 200
    long = [f"{where}: {size} lines" for where, size in sizes.items() if size > MOST_LINES_OF_C]
    assert not long, "\n".join(long)


def test_functions_of_c_are_found() -> None:
    text = "static int one(int x,\n    int y) {\n    return x;\n}\nint two;\nvoid three(void) {\n}\n"
    assert list(functions_of_c(text)) == [("static int one(int x,", 4), ("void three(void) {", 2)]


def test_imports_without_torch() -> None:
    program = (
        "import importlib, sys\nfor name in sys.argv[1:]:\n    importlib.import_module(f'truedraft.{name}')\n"
    )
    program += "    if 'torch' in sys.modules:\n        sys.exit(f'{name} imports torch')"
    result = subprocess.run(
        [sys.executable, "-c", program, *TORCH_FREE], cwd=ROOT, capture_output=True, text=True
    )
    assert (result.returncode, result.stderr) == (0, "")


def test_tests_of_the_server_are_collected_without_torch() -> None:
    """It takes seconds to load, in each of pytest's processes."""
    names = [f"tests.server.{path.stem}" for path in (ROOT / "tests" / "server").glob("*.py")]
    program = (
        "import importlib, sys\nfor name in sys.argv[1:]:\n    importlib.import_module(name)\n"
        "    if 'torch' in sys.modules:\n        sys.exit(f'{name} loads torch')"
    )
    result = subprocess.run(
        [sys.executable, "-c", program, *sorted(names)], cwd=ROOT, capture_output=True, text=True
    )
    assert (result.returncode, result.stderr) == (0, "")


@every_file_of(*PRODUCT)
def test_addresses_of_numbers_are_taken_in_one_place(path: Path) -> None:
    """``engine/memory/pointers.py`` checks what they lead to; those of ctypes structures are no numbers."""
    wrong = {
        node.attr
        for node in ast.walk(tree_of(path))
        if isinstance(node, ast.Attribute) and node.attr in ADDRESSES
    }
    assert not wrong or name_of(path) == "engine/memory/pointers.py", f"{name_of(path)} asks for {wrong}"


def test_one_file_of_the_engine_spells_out_the_draft_models_name() -> None:
    """What drafts is asked by its proposer's name; docstrings may show what users write."""
    spelled = {
        name_of(path)
        for path in modules("engine")
        for node in ast.walk(tree_of(path))
        if isinstance(node, ast.Constant) and node.value == "draft_model"
    }
    # The library's settings are written from the messages by a script.
    assert spelled == {"engine/messages.py", "engine/library/settings.py"}


@every_file_of(*PRODUCT)
def test_file_is_short_and_says_what_it_is(path: Path) -> None:
    text = path.read_text()
    assert len(text.splitlines()) <= MAX_LINES, f"{name_of(path)} has over {MAX_LINES} lines"
    assert not text or ast.get_docstring(tree_of(path)), f"{name_of(path)} has no docstring"


@every_file_of(*PRODUCT, "tests")
def test_nothing_is_left_for_later(path: Path) -> None:
    for mark in ("TO" + "DO", "FIX" + "ME", "X" * 3):
        assert mark not in path.read_text(), f"{name_of(path)} has a {mark}"


def test_changelog_opens_with_the_version() -> None:
    version = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
    headings = [line for line in (ROOT / "CHANGELOG.md").read_text().splitlines() if line.startswith("## ")]
    assert headings[0].startswith(f"## [{version}] - ")


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("import torch.nn as nn", {("torch.nn", False)}),
        ("import truedraft.engine.process.worker", {("engine.process.worker", False)}),
        ("from truedraft.engine import build", {("engine", False), ("engine.build", False)}),
        (
            "def f():\n    from truedraft.engine.commands.generate import run",
            {("engine.commands.generate", True)},
        ),
        ("from ..engine import core", {("engine", False), ("engine.core", False)}),
        ("from . import errors", {("server.routes", False)}),
        ('import_module("truedraft.engine.cuda.kernels")', {("engine.cuda.kernels", False)}),
        ('def f():\n    importlib.import_module("triton")', {("triton", True)}),
        ("import_module(name)", set()),
    ],
)
def test_imports_are_found(source: str, expected: set[tuple[str, bool]]) -> None:
    package = "server" if "..engine" in source else "server.routes"
    assert set(imports(ast.parse(source), package)) == expected


def test_the_old_name_is_gone() -> None:
    """The project had the name of another one; the changelog says so in one line."""
    name = "fore" + "token"
    found = subprocess.run(
        ["git", "grep", "-i", "--text", name], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert [line.split(":")[0] for line in found.stdout.splitlines()] == ["CHANGELOG.md"]
    files = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True)
    assert name not in files.stdout.lower()
