"""Drafts through text against drafts as token ids: python -m benchmarks.translated_draft

The bundled draft three ways, interleaved: as it is; with its token ids shuffled, so that it is another
tokenizer that cuts alike and only translation is added; and with the last merges of its tokenizer taken
away as well, so that it cuts more finely than it was trained to. Then what translation costs on the host
for one round of four tokens, by the length of the text.
"""

import argparse
import json
import statistics
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast

from benchmarks.common import (
    STORY_OPENINGS,
    CpuWatch,
    Run,
    interleave,
    machine,
    median_ratio,
    print_table,
    warn_if_busy,
    warn_of_others,
)
from benchmarks.engine_runs import use_phases
from benchmarks.result_file import Figure, record
from truedraft.engine.build import build_engine
from truedraft.engine.config import BUNDLED_PAIR, EngineConfig
from truedraft.engine.core.engine import EngineCore
from truedraft.engine.memory.batch import Span
from truedraft.engine.messages import Generate, SamplingParams, TokenOutput
from truedraft.engine.proposers.translated.draft_text import DraftText
from truedraft.engine.proposers.translated.pairing import load_tokenizer
from truedraft.engine.proposers.translated.proposer import TranslatedDraftProposer
from truedraft.engine.proposers.translated.target_text import TargetText
from truedraft.engine.proposers.translated.tokenizer import TextTokenizer

TARGET, DRAFT = str(BUNDLED_PAIR / "target"), str(BUNDLED_PAIR / "draft")
TEXT_LENGTHS = (1_000, 4_000, 16_000, 32_000)
TOKENS_PER_ROUND = 4


def save_shuffled(folder: Path, num_merges_removed: int) -> str:
    """The bundled draft with other token ids; it says the same text."""
    model = AutoModelForCausalLM.from_pretrained(DRAFT, dtype=torch.float32)
    vocab_size = model.config.vocab_size
    new_ids = torch.randperm(vocab_size, generator=torch.Generator().manual_seed(0))
    # Weights are compared: both layers may share one.
    layers = model.get_input_embeddings(), model.get_output_embeddings()
    for weight in {layer.weight for layer in layers}:
        weight.data[new_ids] = weight.data.clone()
    for config in (model.config, model.generation_config):
        for name in ("bos_token_id", "eos_token_id", "pad_token_id"):
            setattr(config, name, _renamed(getattr(config, name, None), new_ids.tolist()))
    model.save_pretrained(folder)
    data = json.loads((Path(DRAFT) / "tokenizer.json").read_text())
    data["model"]["vocab"] = {token: int(new_ids[i]) for token, i in data["model"]["vocab"].items()}
    if num_merges_removed:
        data["model"]["merges"] = data["model"]["merges"][:-num_merges_removed]
    for token in data["added_tokens"]:
        token["id"] = int(new_ids[token["id"]])
    data["added_tokens"].sort(key=lambda token: token["id"])
    fast = Tokenizer.from_str(json.dumps(data))
    PreTrainedTokenizerFast(tokenizer_object=fast, eos_token="<|endoftext|>").save_pretrained(folder)
    return str(folder)


def _renamed(ids: Any, new_ids: list[int]) -> Any:
    if isinstance(ids, list):
        return [new_ids[i] for i in ids]
    return ids if ids is None else new_ids[ids]


class Engine:
    """Runs an engine whose time in the draft model's passes is known apart from the rest of drafting."""

    def __init__(self, draft: str | None, num_speculative_tokens: int) -> None:
        self.core: EngineCore = build_engine(
            EngineConfig(target=TARGET, draft=draft or "none", num_speculative_tokens=num_speculative_tokens)
        )
        use_phases(self.core)
        self.forward_seconds = 0.0
        self.num_rounds = 0
        runner: Any = self.core.runner
        proposer = next(iter(runner.proposers), None)
        self.is_translated = isinstance(proposer, TranslatedDraftProposer)
        if proposer is None:
            return
        forward = proposer.model.forward

        def timed_forward(spans: list[Span], *others: Any) -> Any:
            started = time.perf_counter()
            output = forward(spans, *others)
            self.forward_seconds += time.perf_counter() - started
            return output

        proposer.model.forward = timed_forward

    def run(self, prompts: Sequence[list[int]], params: SamplingParams) -> Run:
        for i, prompt in enumerate(prompts):
            self.core.add(Generate(request_id=str(i), prompt_token_ids=prompt, params=params))
        ids: list[list[int]] = [[] for _ in prompts]
        num_rounds = num_drafted = num_accepted = 0
        started = time.perf_counter()
        while self.core.has_work:
            for output in self.core.step():
                assert isinstance(output, TokenOutput)
                ids[int(output.request_id)] += output.token_ids
                num_rounds += 1
                num_drafted += output.num_draft_tokens
                num_accepted += output.num_accepted_tokens
        seconds = time.perf_counter() - started
        self.num_rounds += num_rounds
        return Run(sum(map(len, ids)), seconds, num_rounds, num_drafted, num_accepted, ids)

    @property
    def host_milliseconds(self) -> float:
        """Returns the time of drafting, per sequence and round, without the draft model's passes."""
        return 1000 * (self.core.stats.phase_seconds["draft"] - self.forward_seconds) / self.num_rounds


def compare(drafts: dict[str, str | None], args: argparse.Namespace, temperature: float) -> list[Figure]:
    """Prints a table; returns its acceptance and its ratios to plain decoding."""
    engines = {name: Engine(draft, args.num_speculative_tokens) for name, draft in drafts.items()}
    tokenizer = load_tokenizer(TARGET)
    assert tokenizer is not None
    prompts = [list(tokenizer.encode(text)) for text in STORY_OPENINGS[: args.concurrency]]
    params = SamplingParams(
        max_tokens=args.max_tokens, temperature=temperature, seed=1, verification="rejection", ignore_eos=True
    )
    runs = interleave(
        {name: lambda engine=engine: engine.run(prompts, params) for name, engine in engines.items()},
        args.repeats,
    )
    rows = []
    for name, repeats in runs.items():
        drafted = sum(run.num_draft_tokens for run in repeats)
        accepted = sum(run.num_accepted_tokens for run in repeats)
        rounds = sum(run.num_rounds for run in repeats)
        rows.append(
            {
                "drafts": name,
                "tokens/s": statistics.median(run.tokens_per_second for run in repeats),
                "x_plain": median_ratio(repeats, runs["none"]),
                "accepted": accepted / drafted if drafted else None,
                "drafted_per_round": drafted / rounds,
                "tokens_per_round": sum(run.num_tokens for run in repeats) / rounds,
                "host_ms_per_round": engines[name].host_milliseconds,
                "same_text": str(repeats[0].token_ids == runs["none"][0].token_ids)
                if not temperature
                else None,
            }
        )
    print_table(rows, f"temperature {temperature:g}, {args.concurrency} at a time")
    plain = [run.tokens_per_second for run in runs["none"]]
    figures = []
    for name in drafts.keys() - {"none"}:
        repeats = runs[name]
        accepted = [run.num_accepted_tokens / run.num_draft_tokens for run in repeats]
        speeds = [run.tokens_per_second for run in repeats]
        figures += [
            Figure.of(name, f"accepted, temperature {temperature:g}", accepted),
            Figure.of_ratios(name, f"times plain, temperature {temperature:g}", speeds, plain),
        ]
    return sorted(figures, key=lambda figure: list(drafts).index(figure.row))


def host_cost(draft: str, text_lengths: Sequence[int]) -> None:
    """Times a round's translation, without any model: new text in, the draft's ids out, drafted text back."""
    target, other = (load_tokenizer(path) for path in (TARGET, draft))
    assert target is not None
    assert other is not None
    target_tokenizer = TextTokenizer(target.backend_tokenizer)
    draft_tokenizer = TextTokenizer(other.backend_tokenizer)
    story = " ".join(STORY_OPENINGS)
    ids = target_tokenizer.encode(story * 200).ids
    rows = []
    for length in text_lengths:
        target_text, draft_text = TargetText(target_tokenizer, {}), DraftText(draft_tokenizer)
        started = time.perf_counter()
        draft_text.append(target_text.extend(ids[:length]))
        first = time.perf_counter() - started
        samples = []
        for start in range(length, length + 100 * TOKENS_PER_ROUND, TOKENS_PER_ROUND):
            started = time.perf_counter()
            draft_text.append(target_text.extend(ids[start : start + TOKENS_PER_ROUND]))
            context = draft_text.ids[-8:]
            draft_tokenizer.decode(context)
            draft_tokenizer.decode(context + context[-TOKENS_PER_ROUND:])
            target_tokenizer.encode_after(target_text.tail, " and then they all went home")
            samples.append(time.perf_counter() - started)
        rows.append(
            {
                "tokens_so_far": length,
                "prompt_ms": 1000 * first,
                "round_ms": 1000 * statistics.median(samples),
            }
        )
    print_table(rows, "translation on the host")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--num-speculative-tokens", type=int, default=4)
    parser.add_argument("--merges-removed", type=int, default=700)
    parser.add_argument("--concurrency", type=int, default=1)
    parser.add_argument("--max-tokens", type=int, default=96)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument(
        "--text-lengths", type=int, nargs="*", default=TEXT_LENGTHS, help="of translation alone, in tokens"
    )
    parser.add_argument("--result", metavar="NAME", help="write benchmarks/results/NAME.json")
    args = parser.parse_args()
    warn_if_busy()
    print(machine())
    with tempfile.TemporaryDirectory() as folder:
        shuffled = save_shuffled(Path(folder) / "shuffled", 0)
        finer = save_shuffled(Path(folder) / "finer", args.merges_removed)
        drafts = {"none": None, "as ids": DRAFT, "as text": shuffled, "as text, cut finer": finer}
        watch = CpuWatch()
        figures = [figure for temperature in (0.0, 1.0) for figure in compare(drafts, args, temperature)]
        others = warn_of_others(watch)
        if args.text_lengths:
            host_cost(finer, args.text_lengths)
    record(
        args.result,
        what=f"{args.concurrency} stream, {args.num_speculative_tokens} draft tokens a round",
        rows="drafts",
        model="bundled pair",
        dtype="the file's own weights",
        num_repeats=args.repeats,
        machine=machine() | {"others": others},
        figures=figures,
    )


if __name__ == "__main__":
    main()
