"""Ctrl-C before a command has begun ends the process with one line.

Python's own answer, ``KeyboardInterrupt``, would be a page of traceback through whatever is being imported.
"""

import os
import signal
import sys
from types import FrameType

INTERRUPTED = 130  # shells say by this that SIGINT ended a process


def leave_on_interrupt() -> None:
    """Ends the process on Ctrl-C: nothing has been begun that would have to be cleaned up."""
    signal.signal(signal.SIGINT, _leave)


def raise_on_interrupt() -> None:
    """Lets Ctrl-C be a ``KeyboardInterrupt`` again, unless the process was started to ignore it."""
    if signal.getsignal(signal.SIGINT) is _leave:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def say_interrupted() -> int:
    print("\nInterrupted.", file=sys.stderr)
    return INTERRUPTED


def _leave(number: int, frame: FrameType | None) -> None:
    os.write(2, b"\nInterrupted.\n")
    os._exit(INTERRUPTED)
