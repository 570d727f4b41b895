"""Build wheels and sdist, check them, install this machine's wheel and use it elsewhere.

python -m tools.check_wheel      (in an environment with build and twine: make check-wheel)

A wheel has one importable name. The folder in which it is tried has an ``engine.py`` and a ``server.py`` of
its own, as users' folders do, and the first start finds no C compiler: it takes the kernels that the wheel
brings along. Then the sdist and the repository are installed by their addresses; these compile kernels at
the first start.
"""

import os
import platform
import signal
import socket
import subprocess
import sys
import tempfile
import venv
import zipfile
from pathlib import Path

from tools.build_wheels import build_all
from tools.smoke import try_server

ROOT = Path(__file__).parent.parent
SCRIPT = """\
import engine, server, truedraft
from truedraft import LLM, SamplingParams

assert "site-packages" in truedraft.__file__, truedraft.__file__
completion = LLM().generate("Once upon a time", SamplingParams(max_tokens=20, temperature=0))[0]
print("library:", completion.text)
assert completion.num_accepted_tokens
"""


def run(*command: str | Path, **options: object) -> None:
    print("==>", *command, flush=True)
    subprocess.run([*map(str, command)], check=True, **options)  # type: ignore[call-overload]


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


def try_version(binaries: Path, folder: Path, environment: dict[str, str], kernels: str) -> None:
    """Fails unless ``truedraft --version`` describes its kernels so."""
    command = [binaries / "truedraft", "--version"]
    shown = subprocess.run(
        command, check=True, capture_output=True, text=True, cwd=folder, env=environment
    ).stdout
    print(shown)
    if kernels not in shown:
        raise SystemExit(f"FAILED: --version does not say {kernels!r}")


def try_server_in(binaries: Path, folder: Path, environment: dict[str, str]) -> None:
    """Starts a server, uses it, and ends it."""
    port = free_port()
    server = subprocess.Popen(
        [binaries / "truedraft", "serve", "--port", str(port)], cwd=folder, env=environment
    )
    try:
        try_server(f"http://127.0.0.1:{port}", server)
    finally:
        server.send_signal(signal.SIGTERM)
    if code := server.wait(60):
        raise SystemExit(f"FAILED: exit code {code} after SIGTERM")


def main() -> None:
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    with tempfile.TemporaryDirectory(prefix="check-wheel-") as name:
        work = Path(name)
        build_all(work / "dist")
        packages = sorted((work / "dist").iterdir())
        run(sys.executable, "-m", "twine", "check", "--strict", *packages)
        wheels = [package for package in packages if package.suffix == ".whl"]
        (sdist,) = (package for package in packages if package.suffix != ".whl")
        for wheel in wheels:
            names = {name.split("/")[0] for name in zipfile.ZipFile(wheel).namelist()}
            if {name for name in names if not name.endswith(".dist-info")} != {"truedraft"}:
                raise SystemExit(f"FAILED: {wheel.name} has other top-level names than truedraft: {names}")
        here = next(wheel for wheel in wheels if platform.machine() in wheel.name)
        venv.create(work / "venv", with_pip=True)
        binaries = work / "venv" / "bin"
        pip = [binaries / "python", "-m", "pip", "--disable-pip-version-check", "install", "--quiet"]
        run(*pip, "-c", ROOT / "constraints.txt", here, env=environment)
        folder = work / "elsewhere"
        folder.mkdir()
        for module in ("engine.py", "server.py"):
            (folder / module).touch()
        no_compiler = environment | {"CC": "false", "XDG_CACHE_HOME": str(work / "empty")}
        try_version(binaries, folder, no_compiler, "C, prebuilt for ")
        (folder / "script.py").write_text(SCRIPT)
        run(binaries / "python", "script.py", cwd=folder, env=no_compiler)
        try_server_in(binaries, folder, environment)
        for source in (sdist, f"git+file://{ROOT}"):
            run(*pip, "--no-deps", "--force-reinstall", source, env=environment)
            try_version(binaries, folder, no_compiler, "install a C compiler")
            try_version(binaries, folder, environment, "C, compiled for this processor")
            run(binaries / "python", "script.py", cwd=folder, env=environment)
    print("==> Passed")


if __name__ == "__main__":
    main()
