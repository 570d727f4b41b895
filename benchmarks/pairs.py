"""Finds the pair a benchmark runs on: a trained one of ours, a synthetic one by its shape, or folders."""

import argparse
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

from benchmarks import synthetic_gguf
from benchmarks import synthetic_pair as synthetic
from benchmarks.common import note, read_prompts
from benchmarks.edits import read_edits
from truedraft.engine.build import drafting_method
from truedraft.engine.config import BUNDLED_PAIR
from truedraft.engine.messages import MTP, Method
from truedraft.engine.proposers.translated.pairing import load_tokenizer

BUNDLED = "bundled"
# The bundled target with a head that is trained where it is first asked for, and a trained hybrid with its
# own. The head's texts begin otherwise than those that are measured.
HEAD, HYBRID = "bundled-head", "story-hybrid"
HEAD_TOKENS = 200_000
BEGINNINGS = (
    "One morning,",
    "Every evening",
    "Far away,",
    "In a small house",
    "Near the river",
    "Last winter",
)
HEROES = (
    "a boy",
    "two sisters",
    "an old man",
    "a brown dog",
    "the teacher",
    "a tiny bird",
    "her brother",
    "he",
)
NGRAM: Method = "ngram"
SELF_DRAFTS = ("self:int4", "self:int8")
QUESTIONS = (
    "Why is the sky blue?",
    "Explain how a bicycle stays upright.",
    "What is the difference between a virus and a bacterium?",
    "Give me a recipe for pancakes.",
    "How do I learn to play the guitar?",
    "Describe the water cycle in simple words.",
    "What should I see in Rome in two days?",
    "Write a short letter to a friend who has moved away.",
)


class Pair(NamedTuple):
    """Two checkpoint folders; ``draft`` None for a target alone."""

    name: str
    target: str
    draft: str | None

    @property
    def is_synthetic(self) -> bool:
        return self.name in synthetic.PAIRS

    @property
    def is_gguf(self) -> bool:
        """Tells whether the target is one GGUF file."""
        return self.target.lower().endswith(".gguf")

    @property
    def method(self) -> Method:
        """Returns who drafts."""
        return NGRAM if self.draft is None else drafting_method(self.draft)

    @property
    def draft_file(self) -> str | None:
        """Names the draft, unless it is the target's own weights."""
        return None if self.draft in SELF_DRAFTS else self.draft


def add_pair_options(parser: argparse.ArgumentParser, default: str, *, several: bool = False) -> None:
    choices = [BUNDLED, HEAD, HYBRID, *synthetic.PAIRS, *synthetic_gguf.SHAPES]
    if several:
        parser.add_argument("--pair", choices=choices, nargs="+", default=[default])
    else:
        parser.add_argument("--pair", choices=choices, default=default)
    parser.add_argument("--target", help="checkpoint folders instead of --pair")
    parser.add_argument("--draft", help="with --target; or mtp: the head in the files of a synthetic hybrid")
    parser.add_argument(
        "--file-type",
        choices=synthetic_gguf.SCALES,
        default="Q4_0",
        help="of the matrices of synthetic hybrids and mixtures of experts (default %(default)s)",
    )
    parser.add_argument(
        "--acceptance",
        type=float,
        default=0.88,
        help="of each drafted token, for synthetic pairs (default %(default)s; 0.88: about 0.65 of 5 stand)",
    )
    parser.add_argument("--prompt-length", type=int, default=16, help="tokens, with synthetic pairs")
    parser.add_argument("--work", type=Path, help="keep synthetic pairs and GGUF files here for other runs")


def resolve_pair(arguments: argparse.Namespace, name: str, work: Path) -> Pair:
    """The folders of pair ``name``; a synthetic one is written below ``work`` unless it is there."""
    if arguments.target:
        return Pair("named", arguments.target, arguments.draft)
    if name == BUNDLED:
        return Pair(name, str(BUNDLED_PAIR / "target"), str(BUNDLED_PAIR / "draft"))
    if name == HYBRID:
        return Pair(name, str(Path(__file__).with_name("story_hybrid")), MTP)
    if name == HEAD:
        return Pair(name, str(BUNDLED_PAIR / "target"), str(trained_head(work / name)))
    folder = work / f"{name}-{arguments.acceptance:g}"
    if name in synthetic_gguf.SHAPES:
        files = synthetic_gguf.ensure(
            folder, name, arguments.file_type, arguments.acceptance, mtp=arguments.draft == "mtp"
        )
        return Pair(name, *files)
    if not (folder / "draft" / "tokenizer_config.json").exists():
        note(f"Writing the synthetic pair to {folder}")
        synthetic.save_pair(folder, arguments.acceptance, synthetic.PAIRS[name])
    return Pair(name, str(folder / "target"), str(folder / "draft"))


def trained_head(folder: Path) -> Path:
    """Returns the folder of a head for the bundled target, which is trained there for some minutes first."""
    # A run that was stopped has left what it goes on from.
    if not (folder / "config.json").exists() or (folder / "training.pt").exists():
        note(f"Training a head in {folder}")
        folder.mkdir(parents=True, exist_ok=True)
        prompts = folder / "prompts.txt"
        texts = [f"{beginning} {hero}" for beginning in BEGINNINGS for hero in HEROES]
        prompts.write_text("\n".join(texts), encoding="utf-8")
        options = ["--prompts", str(prompts), "--out", str(folder), "--tokens", str(HEAD_TOKENS)]
        subprocess.run([sys.executable, "-m", "truedraft", "train-draft", *options], check=True)
    return folder


def prompt_ids(
    pair: Pair, number: int, prompt_length: int, file: Path | None = None, vocab_size: int | None = None
) -> list[list[int]]:
    """``number`` prompts: random ids for a synthetic pair, else encoded texts, over and over."""
    if pair.is_synthetic and file is None:
        size = vocab_size or synthetic.PAIRS[pair.name].vocab_size
        return synthetic.prompts(size, number, prompt_length)
    tokenizer = load_tokenizer(pair.target)
    if tokenizer is None:
        raise SystemExit(f"{pair.target} has no tokenizer")
    texts = read_prompts(file)
    return [list(tokenizer.encode(texts[i % len(texts)])) for i in range(number)]


def chat_prompt_ids(pair: Pair, number: int, kind: str) -> list[list[int]]:
    """Returns ``number`` prompts through the target's chat template: ``questions``, or ``edits`` of small
    programs, whose answers repeat most of the prompt."""
    tokenizer = load_tokenizer(pair.target)
    if tokenizer is None or not tokenizer.chat_template:
        raise SystemExit(f"{pair.target} has no chat template")
    if kind == "edits":
        texts = [f"{edit.instruction}\n```python\n{edit.input}```" for edit in read_edits(None, number)]
    else:
        texts = [QUESTIONS[i % len(QUESTIONS)] for i in range(number)]
    chats = [[{"role": "user", "content": text}] for text in texts]
    return [
        list(tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_dict=False))
        for chat in chats
    ]
