"""The real worker, whose models are drawn on the device: no weights are written to a disk or read from it.

    benchmarks.online.running_server(settings, worker=("drawn_worker.py", "--pair", "8b"))

The folders that the server is given have configurations and tokenizers (``on_device.save_folders``).
"""

import argparse
import sys
from unittest import mock

from benchmarks import on_device
from benchmarks import synthetic_pair as synthetic
from truedraft.engine import build
from truedraft.engine.machine.lifeline import end_with_parent
from truedraft.engine.process import worker


def main() -> int:
    end_with_parent()
    parser = argparse.ArgumentParser()
    parser.add_argument("--pair", choices=synthetic.PAIRS, required=True)
    parser.add_argument("--acceptance", type=float, default=0.8)
    options, others = parser.parse_known_args()
    sys.argv[1:] = others
    draw = on_device.drawing(synthetic.PAIRS[options.pair], options.acceptance)
    with mock.patch.object(build, "load_model", draw):
        return worker.main()


if __name__ == "__main__":
    sys.exit(main())
