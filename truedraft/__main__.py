"""``python -m truedraft`` and the command ``truedraft``.

Imports take seconds; Ctrl-C meanwhile ends the process with one line.
"""

import sys

from truedraft.server.cli.interrupts import leave_on_interrupt


def main() -> int:
    leave_on_interrupt()
    from truedraft.server.cli.main import main as run

    return run()


if __name__ == "__main__":
    sys.exit(main())
