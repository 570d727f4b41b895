"""Build the Dockerfile's cpu target without Docker, start the image's server as its own user, and ask it.

python -m tools.check_docker [--target cpu] [--keep FOLDER]

buildah executes the Dockerfile step by step in a chroot, on a Debian base that debootstrap makes in place of
the registry's image. Needs root, debootstrap and buildah (Debian packages), a network or mirrors that pip is
configured for, and about 5 GB of disk; where one of the tools is missing it says so and skips. What it cannot
show: Docker's own builder, its network, and the health check's timer.
"""

import argparse
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tools.smoke import try_server
from tools.torch_index import is_reachable, torch_index

ROOT = Path(__file__).parent.parent
DEBIAN = "bookworm"
MIRROR = "http://deb.debian.org/debian"
BASE = "docker.io/library/debian:bookworm-slim"
IMAGE = "localhost/truedraft:check"
PORT = 18765


class Buildah:
    """buildah with storage of its own below ``folder``."""

    def __init__(self, folder: Path) -> None:
        self.command = ["buildah", "--root", str(folder / "storage"), "--runroot", str(folder / "run")]

    def __call__(self, *arguments: str) -> str:
        return subprocess.run(
            [*self.command, *arguments], check=True, stdout=subprocess.PIPE, text=True
        ).stdout.strip()


def missing() -> list[str]:
    tools = [tool for tool in ("debootstrap", "buildah", "chroot") if shutil.which(tool) is None]
    return [*tools, *(["root"] if os.geteuid() else [])]


def make_base(buildah: Buildah, folder: Path) -> None:
    root = folder / "base"
    subprocess.run(
        ["debootstrap", "--variant=minbase", DEBIAN, str(root), MIRROR], check=True, stdout=subprocess.DEVNULL
    )
    container = buildah("from", "scratch")
    buildah("add", "--quiet", container, str(root), "/")
    buildah("commit", "--quiet", container, BASE)
    buildah("rm", container)
    shutil.rmtree(root)


def pip_settings(folder: Path) -> list[str]:
    """Volumes that let pip in the build use this machine's indexes and certificates."""
    volumes, settings = {}, {}
    listed = subprocess.run(
        [sys.executable, "-m", "pip", "config", "list"], check=True, capture_output=True, text=True
    ).stdout
    for line in listed.splitlines():
        name, _, value = line.partition("=")
        value = value.strip("'")
        for word in value.replace("file://", "").split():
            # A folder of packages is wanted together with what its links lead to.
            if Path(word).is_absolute() and Path(word).exists():
                path = Path(word).parent if Path(word).name == "simple" else Path(word)
                volumes[str(path)] = f"/run/pip{path}"
                value = value.replace(
                    word, f"/run/pip{path}/simple" if path != Path(word) else f"/run/pip{path}"
                )
        settings[name.rpartition(".")[2]] = value
    lines = [f"{name} = {value}\n" for name, value in settings.items()]
    (folder / "pip.conf").write_text("[global]\n" + "".join(lines))
    mounts = [f"{source}:{target}:ro" for source, target in volumes.items()]
    return [f"--volume={mount}" for mount in (*mounts, f"{folder}/pip.conf:/etc/pip.conf:ro")]


def torch_source() -> list[str]:
    """Returns build arguments: none where the CPU builds' index answers, else pip's own indexes are used."""
    if is_reachable(torch_index()):
        return []
    print(f"{torch_index()} cannot be reached: torch comes from where pip is configured to look")
    return ["--build-arg=TORCH_INDEX=https://pypi.org/simple"]


@contextmanager
def serving(buildah: Buildah, container: str) -> Iterator[subprocess.Popen[bytes]]:
    image = json.loads(buildah("inspect", "--type", "image", IMAGE))["OCIv1"]["config"]
    command = [*image["Entrypoint"], *image["Cmd"]]
    environment = [f"--env=TRUEDRAFT_PORT={PORT}", "--env=TRUEDRAFT_HOST=127.0.0.1"]
    run = [*buildah.command, "run", "--isolation", "chroot", *environment, container, "--", *command]
    process = subprocess.Popen(run)
    try:
        yield process
    finally:
        if process.poll() is None:
            process.terminate()
            process.wait(60)


def server_process() -> int:
    """The process id of the server that listens on ``PORT``, by its environment."""
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            variables = (folder / "environ").read_bytes().split(b"\0")
            arguments = (folder / "cmdline").read_bytes().split(b"\0")
        except OSError:
            continue
        if f"TRUEDRAFT_PORT={PORT}".encode() in variables and b"serve" in arguments:
            return int(folder.name)
    raise SystemExit("FAILED: the server's process was not found")


def try_image(buildah: Buildah) -> None:
    container = buildah("from", "--pull-never", IMAGE)
    with serving(buildah, container) as process:
        try_server(f"http://127.0.0.1:{PORT}", process)
        server = server_process()
        user = (Path("/proc") / str(server)).stat().st_uid
        print("user:", user)
        if user == 0:
            raise SystemExit("FAILED: the server runs as root")
        # The image's STOPSIGNAL, as a container's stop sends it.
        os.kill(server, signal.SIGTERM)
        code = process.wait(60)
        print("exit code after SIGTERM:", code)
        if code:
            raise SystemExit("FAILED: the server did not shut down in order")
    run = [*buildah.command, "run", "--isolation", "chroot", "--env=XDG_CACHE_HOME=/read-only", container]
    print("where nothing can be compiled:", flush=True)
    subprocess.run([*run, "--", "truedraft", "--version"], check=True)
    buildah("rm", container)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--target", default="cpu")
    parser.add_argument("--keep", type=Path, help="keep base and images in this folder, and use them again")
    options = parser.parse_args()
    if lacking := missing():
        print(f"SKIPPED: make check-docker needs {', '.join(lacking)}")
        return
    folder = options.keep or Path(tempfile.mkdtemp(prefix="check-docker-", dir="/var/tmp"))
    folder.mkdir(parents=True, exist_ok=True)
    buildah = Buildah(folder)
    try:
        if BASE not in buildah("images", "--format", "{{.Name}}:{{.Tag}}"):
            print(f"==> A Debian {DEBIAN} base", flush=True)
            make_base(buildah, folder)
        print(f"==> The steps of the Dockerfile, target {options.target}", flush=True)
        build = ["build", "--isolation", "chroot", "--pull-never", "--layers", "--target", options.target]
        build += [*pip_settings(folder), *torch_source(), "--format", "docker", "--tag", IMAGE]
        subprocess.run([*buildah.command, *build, str(ROOT)], check=True)
        print("==> The image's server", flush=True)
        if options.target == "cpu":
            try_image(buildah)
        print("==> Passed")
    finally:
        if options.keep is None:
            buildah("rm", "--all")
            buildah("rmi", "--all", "--force")
            shutil.rmtree(folder)


if __name__ == "__main__":
    main()
