"""Build wheel and sdist, check them, install the wheel into a new environment and use it elsewhere.

python -m tools.check_wheel      (in an environment with build and twine: make check-wheel)

The wheel has one importable name. The folder in which it is tried has an ``engine.py`` and a ``server.py`` of
its own, as users' folders do, and the first start finds no C compiler.
"""

import os
import signal
import socket
import subprocess
import sys
import tempfile
import venv
import zipfile
from pathlib import Path

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


def try_installed(binaries: Path, folder: Path, environment: dict[str, str]) -> None:
    without_compiler = environment | {"CC": "false"}
    shown = subprocess.run(
        [binaries / "truedraft", "--version"],
        check=True,
        capture_output=True,
        text=True,
        cwd=folder,
        env=without_compiler,
    )
    print(shown.stdout)
    if "install a C compiler" not in shown.stdout:
        raise SystemExit("FAILED: --version does not say that the kernels are missing")
    (folder / "script.py").write_text(SCRIPT)
    run(binaries / "python", "script.py", cwd=folder, env=environment)
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
        run(sys.executable, "-m", "build", "--outdir", work / "dist", ROOT, stdout=subprocess.DEVNULL)
        packages = sorted((work / "dist").iterdir())
        run(sys.executable, "-m", "twine", "check", "--strict", *packages)
        for package in packages:
            print(f"{package.name}: {package.stat().st_size / 1e6:.1f} MB")
        wheel = next(package for package in packages if package.suffix == ".whl")
        names = {name.split("/")[0] for name in zipfile.ZipFile(wheel).namelist()}
        print("top-level names:", *sorted(names))
        if {name for name in names if not name.endswith(".dist-info")} != {"truedraft"}:
            raise SystemExit("FAILED: the wheel has other names than truedraft")
        venv.create(work / "venv", with_pip=True)
        binaries = work / "venv" / "bin"
        pip = [binaries / "python", "-m", "pip", "--disable-pip-version-check", "install", "--quiet"]
        run(*pip, "-c", ROOT / "constraints.txt", wheel, env=environment)
        folder = work / "elsewhere"
        folder.mkdir()
        for module in ("engine.py", "server.py"):
            (folder / module).touch()
        try_installed(binaries, folder, environment)
    print("==> Passed")


if __name__ == "__main__":
    main()
