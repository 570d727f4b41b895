"""``python -m truedraft``: the same as the command ``truedraft``."""

import sys

from truedraft.server.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
