r"""Write stories by the trained target, on which its draft is distilled: what it will be asked to continue.

    python tools/sample_stories.py --target engine/demo_pair/target --corpus stories.train.txt \
        --out samples.txt

Each story begins with the first words of one of the corpus and goes on at temperature 0, 0.8 or 1. The file
has them as the corpus has its own.
"""

import argparse
import random
from pathlib import Path

from story_data import END_OF_TEXT, read_stories
from tqdm import tqdm
from transformers.utils import logging

from truedraft.engine.llm import LLM
from truedraft.engine.messages import SamplingParams

TEMPERATURES = (0.0, 0.8, 0.8, 1.0)
WORDS = (3, 20)
MAX_TOKENS = 240
BATCH = 512


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--target", type=Path, required=True)
    parser.add_argument("--corpus", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--stories", type=int, default=9_216)
    parser.add_argument("--seed", type=int, default=0)
    return parser.parse_args()


def main() -> None:
    args = parse_arguments()
    logging.set_verbosity_error()
    rng = random.Random(args.seed)
    stories = read_stories(args.corpus)
    llm = LLM(target=str(args.target), draft="none")
    with args.out.open("w", encoding="utf-8") as file:
        for start in tqdm(range(0, args.stories, BATCH), unit="batch"):
            openings, params = [], []
            for index in range(start, min(start + BATCH, args.stories)):
                openings.append(" ".join(rng.choice(stories).split(" ")[: rng.randint(*WORDS)]))
                temperature = rng.choice(TEMPERATURES)
                params.append(SamplingParams(max_tokens=MAX_TOKENS, temperature=temperature, seed=index))
            for opening, completion in zip(openings, llm.generate(openings, params), strict=True):
                file.write(f"{opening}{completion.text}\n{END_OF_TEXT}\n")


if __name__ == "__main__":
    main()
