"""Starts the worker, with its arguments: ``python -P -m truedraft.engine.process.spawned``.

Importing the engine takes seconds, in which the front end may already be gone; so this comes first.
"""

import gc
import signal
import sys

from truedraft.engine.machine.lifeline import end_with_parent

# Ctrl-C and a service manager's SIGTERM reach all processes of a group or service. The front end decides when
# to leave, and the kernel does when the front end is gone.
FOR_THE_FRONT_END = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


def main() -> int:
    end_with_parent()
    for number in FOR_THE_FRONT_END:
        signal.signal(number, signal.SIG_IGN)
    # Imported objects stay. To look through them for garbage, again and again, would be a fifth of the time.
    gc.disable()
    from truedraft.engine.process.worker import main as run_worker

    gc.freeze()
    gc.enable()
    return run_worker()


if __name__ == "__main__":
    sys.exit(main())
