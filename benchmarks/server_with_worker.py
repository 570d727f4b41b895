"""Starts the real server process with another worker than ``engine.process.worker``: a script of this folder.

Started by its path, so that ``server`` and ``engine`` come from PYTHONPATH, which may be another checkout.
Arguments before ``--`` are the server's flags; after it come the script's name and its own.
"""

import sys
from functools import partial
from pathlib import Path

from prometheus_client import disable_created_metrics

from truedraft.server.cli import launch
from truedraft.server.cli.settings_sources import load_settings
from truedraft.server.observability.logs import configure_logging
from truedraft.server.workers.worker_client import WorkerClient


def main() -> None:
    split = sys.argv.index("--")
    flags, (script, *options) = sys.argv[1:split], sys.argv[split + 1 :]
    worker = str(Path(__file__).with_name(script))
    launch.WorkerClient = partial(WorkerClient, worker_command=(sys.executable, worker, *options))
    # The rest is what `truedraft serve` does.
    settings = load_settings(flags)
    configure_logging(settings.log_level)
    disable_created_metrics()
    launch.launch(settings)


if __name__ == "__main__":
    main()
