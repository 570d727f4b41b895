"""Starts a rank other than 0; ``models.ranks`` does it: ``python -P -m truedraft.engine.process.follower``.

It ends with rank 0: by the kernel where rank 0's main thread has started it, by the end of the connection, or
because it has nobody to gather with.
"""

import argparse
import signal
import sys
from functools import partial
from multiprocessing.connection import Connection

from truedraft.engine.machine.lifeline import end_with_parent
from truedraft.engine.process.spawned import FOR_THE_FRONT_END


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m truedraft.engine.process.follower")
    parser.add_argument("--socket", required=True, type=int, help="this end of the connection: a descriptor")
    parser.add_argument("--rank", required=True, type=int, help="its number among the ranks")
    parser.add_argument("--meeting", required=True, help="the file at which ranks meet")
    parser.add_argument("--tied", action="store_true", help="let the kernel end it with rank 0's main thread")
    parser.add_argument("--config", required=True, help="EngineConfig as JSON")
    args = parser.parse_args()
    if args.tied:
        end_with_parent()
    for number in FOR_THE_FRONT_END:
        signal.signal(number, signal.SIG_IGN)
    from transformers.utils import logging as transformers_logging

    from truedraft.engine.config import EngineConfig
    from truedraft.engine.errors import ModelLoadError
    from truedraft.engine.models.ranks import follow
    from truedraft.engine.parallel.group import RankLostError, Ranks

    transformers_logging.disable_progress_bar()
    config = EngineConfig.model_validate_json(args.config)
    try:
        meet = partial(Ranks, args.rank, config.tensor_parallel_size, args.meeting)
        follow(config, args.rank, Connection(args.socket), meet)
    except ModelLoadError as error:  # Most often rank 0 finds the same fault, and tells it.
        print(f"rank {args.rank}: {error}", file=sys.stderr)
        return 2
    except RankLostError as error:
        print(f"rank {args.rank}: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
