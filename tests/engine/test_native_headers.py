"""Python and C agree: structures lie as the compiler lays them out, and numbers are Python's."""

import ctypes
import re
import subprocess
from pathlib import Path

import pytest

from tools.write_headers import WRITTEN
from truedraft.engine.native import compiler, headers, library, shared

pytestmark = pytest.mark.usefixtures("needs_compiler")

STRUCTS = [kind for kind in vars(library).values() if isinstance(kind, type(ctypes.Structure))]


def layout_in_c(struct: str, names: list[str], folder: Path) -> list[int]:
    """Offsets of the fields, then the size."""
    values = [f"offsetof({struct}, {name})" for name in names] + [f"sizeof({struct})"]
    code = "".join(f'#include "{path.name}"\n' for path in headers.HEADERS if path.name != "vectors.h")
    lines = "".join(f'printf("%zu ", (size_t){value});' for value in values)
    source = folder / "layout.c"
    source.write_text(
        f"#include <stddef.h>\n#include <stdio.h>\n{code}int main(void) {{ {lines} return 0; }}\n"
    )
    program = folder / "layout"
    command = [*compiler.find_compiler().split(), f"-I{headers.FOLDER}", str(source), "-o", str(program)]
    subprocess.run(command, check=True)
    return [int(word) for word in subprocess.run([program], check=True, capture_output=True).stdout.split()]


def layout(struct: type[ctypes.Structure], names: list[str]) -> list[int]:
    return [getattr(struct, name).offset for name in names] + [ctypes.sizeof(struct)]


@pytest.mark.parametrize("struct", STRUCTS, ids=lambda struct: struct.__name__)
def test_structures_lie_as_the_compiler_lays_them_out(struct: type[ctypes.Structure], tmp_path: Path) -> None:
    names = [name for name, *_ in struct._fields_]
    in_c = layout_in_c(struct.__name__, names, tmp_path)
    assert layout(struct, names) == in_c
    reversed_fields = type("Reversed", (ctypes.Structure,), {"_fields_": struct._fields_[::-1]})
    assert layout(reversed_fields, names) != in_c


def test_functions_have_the_arguments_of_their_definitions() -> None:
    loaded = library.load_library()
    assert loaded is not None
    code = headers.COMMENT.sub("", "".join(path.read_text() for path in compiler.SOURCES))
    declared = headers.FUNCTION.findall(headers._code())
    assert len(declared) > 20
    for result, name, arguments in declared:
        (defined,) = re.findall(rf"^{result} {name}\(([^)]*)\) \{{", code, re.MULTILINE)
        assert defined.split() == arguments.split()
        assert len(getattr(loaded, name).argtypes) == (0 if arguments == "void" else arguments.count(",") + 1)


def test_there_is_nothing_to_warn_of() -> None:
    flags = ["-std=gnu11", "-pthread", "-march=native", "-Wall", "-Wextra", "-Werror", "-fsyntax-only"]
    result = subprocess.run(
        [*compiler.find_compiler().split(), *flags, *map(str, compiler.SOURCES)],
        capture_output=True,
        text=True,
    )
    assert result.returncode == 0, result.stderr


@pytest.mark.parametrize("name", WRITTEN)
def test_headers_are_written_from_python(name: str) -> None:
    """``make written`` writes them anew."""
    assert (headers.FOLDER / name).read_text(encoding="utf-8") == WRITTEN[name]()


def test_a_changed_number_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(shared.CONSTANTS, "COLUMNS", ("64", "columns"))
    assert (headers.FOLDER / "shared.h").read_text(encoding="utf-8") != WRITTEN["shared.h"]()


def test_c_reads_the_numbers_that_python_has(tmp_path: Path) -> None:
    expected = {
        name: int(number) for members in shared.ENUMERATIONS.values() for name, number in members.items()
    }
    prints = "".join(f'printf("{name} %lld\\n", (long long){name});\n' for name in expected)
    program = tmp_path / "numbers.c"
    program.write_text(f'#include <stdio.h>\n#include "shared.h"\nint main(void) {{\n{prints}return 0;\n}}\n')
    built = tmp_path / "numbers"
    subprocess.run(
        [*compiler.find_compiler().split(), f"-I{headers.FOLDER}", program, "-o", built], check=True
    )
    found = subprocess.run([built], check=True, capture_output=True, text=True).stdout.splitlines()
    assert {line.split()[0]: int(line.split()[1]) for line in found} == expected
