"""``python -m server``: the same as the ``foretoken`` command."""

import sys

from server.cli import main

if __name__ == "__main__":
    sys.exit(main())
