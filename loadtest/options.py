"""How commands that are clients of a server read their options."""

import argparse
from typing import NoReturn


class OneLineParser(argparse.ArgumentParser):
    """A mistake is one line, without the page of usage."""

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: error: {message}. See '{self.prog} --help'.\n")
