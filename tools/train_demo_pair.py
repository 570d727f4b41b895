r"""Train the bundled demo pair: a byte-level BPE tokenizer, a small Llama target, a one-layer draft.

    python tools/train_demo_pair.py --corpus stories.train.txt --validation stories.valid.txt \
        --work-dir runs/demo --out engine/demo_pair

The target learns next-token prediction (Muon for matrices, AdamW for the rest). The draft starts as
the target's first layers between its embeddings and its head, and is distilled from it (cross-entropy and
total variation to the target's distribution at every position: acceptance is 1 - TV), on the corpus and, with
``--samples``, on stories by the target (``sample_stories.py``). ``--target`` takes a trained target, whose
draft is trained alone. Learning rates follow the share of the minutes spent. A stopped run goes on from its
last checkpoint. CPU or CUDA.
"""

import argparse
import json
import time
from collections.abc import Callable
from pathlib import Path

import torch
import torch.nn.functional as F
from muon import Muon, split_parameters
from story_data import (
    CHAT_TEMPLATE,
    END_OF_TEXT,
    StoryStream,
    read_stories,
    train_tokenizer,
    validation_windows,
)
from tokenizers import Tokenizer
from tqdm import tqdm
from transformers import (
    GenerationConfig,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedTokenizerFast,
    logging,
)

LossFunction = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--corpus", type=Path, required=True)
    parser.add_argument("--validation", type=Path, required=True)
    parser.add_argument("--target", type=Path, help="a trained target, for a draft alone")
    parser.add_argument("--samples", type=Path, help="stories by the target, for the draft")
    parser.add_argument("--work-dir", type=Path, required=True, help="checkpoints and the log")
    parser.add_argument("--out", type=Path, required=True, help="receives target/ and draft/")
    parser.add_argument("--vocab-size", type=int, default=2048)
    parser.add_argument("--hidden", type=int, default=192, help="hidden size of both models")
    parser.add_argument("--mlp", type=int, default=512)
    parser.add_argument("--heads", type=int, default=3)
    parser.add_argument("--target-layers", type=int, default=16)
    parser.add_argument("--draft-layers", type=int, default=1)
    parser.add_argument("--context", type=int, default=1024)
    parser.add_argument("--target-minutes", type=float, default=80)
    parser.add_argument("--draft-minutes", type=float, default=15)
    parser.add_argument("--tokens-per-step", type=int, default=8192)
    parser.add_argument("--draft-tokens-per-step", type=int, default=2048)
    parser.add_argument("--window", type=int, default=256, help="first 75 %% of the time")
    parser.add_argument("--final-window", type=int, default=1024, help="the rest")
    parser.add_argument("--chat-share", type=float, default=0.3)
    parser.add_argument("--matrix-lr", type=float, default=0.02)
    parser.add_argument("--other-lr", type=float, default=4e-3)
    parser.add_argument("--weight-decay", type=float, default=0.05)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--threads", type=int, default=0, help="0: torch's default")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--precision", choices=["auto", "float32", "bfloat16"], default="auto")
    return parser.parse_args()


def compute_dtype(args: argparse.Namespace) -> torch.dtype:
    """bfloat16 only where the hardware multiplies it natively; elsewhere it is slower than float32."""
    if args.precision != "auto":
        return torch.bfloat16 if args.precision == "bfloat16" else torch.float32
    native = args.device != "cpu" or torch.cpu._is_avx512_bf16_supported()
    return torch.bfloat16 if native else torch.float32


def build_model(args: argparse.Namespace, layers: int) -> LlamaForCausalLM:
    config = LlamaConfig(
        vocab_size=args.vocab_size,
        hidden_size=args.hidden,
        intermediate_size=args.mlp,
        num_hidden_layers=layers,
        num_attention_heads=args.heads,
        num_key_value_heads=args.heads,
        max_position_embeddings=args.context,
        tie_word_embeddings=True,
        bos_token_id=0,
        eos_token_id=[0, 2],
        pad_token_id=None,
    )
    return LlamaForCausalLM(config).to(args.device)


def learning_rate_scale(step: int, progress: float) -> float:
    """50 steps of warm-up, constant to half the time, then linear to 2 %."""
    return min(1.0, (step + 1) / 50) * (1.0 if progress < 0.5 else 1 - 0.98 * (progress - 0.5) / 0.5)


class Trainer:
    """Trains one model: loss, optimisers, time-driven schedule, checkpoints, validation."""

    def __init__(self, args: argparse.Namespace, name: str, model: LlamaForCausalLM, loss: LossFunction):
        self.args, self.name, self.model, self.loss = args, name, model, loss
        self.tokens_per_step = args.draft_tokens_per_step if name == "draft" else args.tokens_per_step
        self.dtype = compute_dtype(args)
        matrices, others = split_parameters(model)
        self.optimizers = [
            Muon(matrices, lr=args.matrix_lr, weight_decay=args.weight_decay, dtype=self.dtype),
            torch.optim.AdamW(others, lr=args.other_lr, betas=(0.9, 0.95), weight_decay=0.0),
        ]
        self.step, self.tokens, self.elapsed = 0, 0, 0.0
        self.path = args.work_dir / f"{name}.pt"

    def run(self, minutes: float, stream: StoryStream, validate: Callable[[], dict[str, float]]) -> None:
        self._resume()
        budget = minutes * 60
        last_save = self.elapsed
        bar = tqdm(total=round(budget), initial=round(self.elapsed), unit="s", desc=self.name)
        while self.elapsed < budget:
            started = time.perf_counter()
            loss = self._train_step(stream, self.elapsed / budget)
            self.elapsed += time.perf_counter() - started
            bar.n = round(min(self.elapsed, budget))
            bar.set_postfix(step=self.step, tokens=f"{self.tokens / 1e6:.2f}M", loss=f"{loss:.3f}")
            if self.step % 250 == 0:
                self._log({"train_loss": loss, **validate()})
            if self.elapsed - last_save > 120:
                self._save()
                last_save = self.elapsed
        bar.close()
        self._log(validate())
        self._save()

    def _train_step(self, stream: StoryStream, progress: float) -> float:
        scale = learning_rate_scale(self.step, progress)
        window = self.args.window if progress < 0.75 else self.args.final_window
        ids = stream.batch(self.tokens_per_step, window).to(self.args.device)
        # Short micro-batches keep the logits in cache on a CPU; the gradient is the sum of all.
        micro_batches = ids.split(max(1, 4096 // window))
        total = 0.0
        for micro_batch in micro_batches:
            with torch.autocast(self.args.device, self.dtype, enabled=self.dtype != torch.float32):
                logits = self.model(input_ids=micro_batch[:, :-1], use_cache=False).logits
            loss = self.loss(logits.float(), micro_batch) / len(micro_batches)
            loss.backward()
            total += loss.item()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        for optimizer, base in zip(self.optimizers, (self.args.matrix_lr, self.args.other_lr), strict=True):
            for group in optimizer.param_groups:
                group["lr"] = base * scale
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        self.step += 1
        self.tokens += ids.shape[0] * window
        return total

    def _log(self, values: dict[str, float]) -> None:
        row = {
            "model": self.name,
            "step": self.step,
            "tokens": self.tokens,
            "minutes": round(self.elapsed / 60, 2),
            **{k: round(v, 4) for k, v in values.items()},
        }
        with (self.args.work_dir / "log.jsonl").open("a") as log:
            log.write(json.dumps(row) + "\n")
        tqdm.write(json.dumps(row))

    def _save(self) -> None:
        state = {
            "model": self.model.state_dict(),
            "optimizers": [optimizer.state_dict() for optimizer in self.optimizers],
            "progress": (self.step, self.tokens, self.elapsed),
        }
        partial = self.path.with_suffix(".partial")
        torch.save(state, partial)
        partial.replace(self.path)

    def _resume(self) -> None:
        if not self.path.exists():
            return
        state = torch.load(self.path, map_location=self.args.device)
        self.model.load_state_dict(state["model"])
        for optimizer, saved in zip(self.optimizers, state["optimizers"], strict=True):
            optimizer.load_state_dict(saved)
        self.step, self.tokens, self.elapsed = state["progress"]
        print(f"{self.name}: going on from step {self.step}, {self.elapsed / 60:.1f} minutes")


def next_token_loss(logits: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    """Mean cross-entropy; logits [batch, window, vocab], ids [batch, window + 1]."""
    return F.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten())


@torch.no_grad()
def copy_first_layers(target: LlamaForCausalLM, draft: LlamaForCausalLM) -> None:
    """Both have one hidden size, so the draft can start with the target's embeddings and head."""
    draft.model.embed_tokens.load_state_dict(target.model.embed_tokens.state_dict())
    draft.model.norm.load_state_dict(target.model.norm.state_dict())
    for layer, source in zip(draft.model.layers, target.model.layers, strict=False):
        layer.load_state_dict(source.state_dict())


def distillation_loss(target: LlamaForCausalLM, dtype: torch.dtype) -> LossFunction:
    """KL(target || draft) plus total variation: 1 - TV is the acceptance probability itself."""

    def loss(logits: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        with torch.no_grad(), torch.autocast(ids.device.type, dtype, enabled=dtype != torch.float32):
            target_logits = target(input_ids=ids[:, :-1], use_cache=False).logits
        target_probs = target_logits.float().softmax(-1)
        log_draft = logits.log_softmax(-1)
        cross_entropy = -(target_probs * log_draft).sum(-1).mean()
        total_variation = 0.5 * (target_probs - log_draft.exp()).abs().sum(-1).mean()
        return 0.5 * cross_entropy + total_variation

    return loss


@torch.no_grad()
def evaluate(
    args: argparse.Namespace,
    model: LlamaForCausalLM,
    tokenizer: Tokenizer,
    stories: list[str],
    target: LlamaForCausalLM | None = None,
) -> dict[str, float]:
    """Validation loss in nats per token and, with a target, mean overlap 1 - TV at temperature 1."""
    losses, overlaps = [], []
    for batch in validation_windows(tokenizer, stories, args.window):
        ids = batch.to(args.device)
        logits = model(input_ids=ids[:, :-1], use_cache=False).logits.float()
        losses.append(next_token_loss(logits, ids))
        if target is not None:
            target_logits = target(input_ids=ids[:, :-1], use_cache=False).logits.float()
            overlaps.append(torch.minimum(logits.softmax(-1), target_logits.softmax(-1)).sum(-1).mean())
    result = {"validation_loss": torch.stack(losses).mean().item()}
    if overlaps:
        result["overlap"] = torch.stack(overlaps).mean().item()
    return result


def export(model: LlamaForCausalLM, tokenizer: Tokenizer, folder: Path, context: int) -> None:
    """A transformers checkpoint folder, weights in float16."""
    folder.mkdir(parents=True, exist_ok=True)
    model.half().save_pretrained(folder)
    model.float()
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token=END_OF_TEXT,
        model_max_length=context,
        clean_up_tokenization_spaces=False,
    )
    fast.chat_template = CHAT_TEMPLATE
    fast.save_pretrained(folder)
    GenerationConfig(bos_token_id=0, eos_token_id=[0, 2], do_sample=True, temperature=0.7).save_pretrained(
        folder
    )


def record_arguments(args: argparse.Namespace) -> None:
    """Writes next to the pair, or its draft, what it was trained with: files by their names only."""
    values = {k: v.name if isinstance(v, Path) else v for k, v in vars(args).items()}
    args.out.mkdir(parents=True, exist_ok=True)
    name = "draft_arguments.json" if args.target else "arguments.json"
    (args.out / name).write_text(json.dumps(values, indent=1) + "\n")


def main() -> None:
    args = parse_arguments()
    logging.set_verbosity_error()
    torch.manual_seed(args.seed)
    if args.threads:
        torch.set_num_threads(args.threads)
    args.work_dir.mkdir(parents=True, exist_ok=True)
    record_arguments(args)
    stories, validation = read_stories(args.corpus), read_stories(args.validation)
    tokenizer_path = (args.target or args.work_dir) / "tokenizer.json"
    if not tokenizer_path.exists():
        train_tokenizer(stories, args.vocab_size).save(str(tokenizer_path))
    tokenizer = Tokenizer.from_file(str(tokenizer_path))
    target, draft = build_model(args, args.target_layers), build_model(args, args.draft_layers)
    print(
        f"target {target.num_parameters():,} parameters, draft {draft.num_parameters():,}, "
        f"{compute_dtype(args)} on {args.device}"
    )

    if args.target:
        trained = LlamaForCausalLM.from_pretrained(args.target, dtype=torch.float32)
        target.load_state_dict(trained.state_dict())
    else:
        trainer = Trainer(args, "target", target, next_token_loss)
        trainer.run(
            args.target_minutes,
            StoryStream(tokenizer, stories, args.chat_share, args.seed),
            lambda: evaluate(args, target, tokenizer, validation),
        )
        export(target, tokenizer, args.out / "target", args.context)
    target.eval().requires_grad_(False)

    copy_first_layers(target, draft)
    if args.samples:
        stories += read_stories(args.samples)
    trainer = Trainer(args, "draft", draft, distillation_loss(target, compute_dtype(args)))
    trainer.run(
        args.draft_minutes,
        StoryStream(tokenizer, stories, args.chat_share, args.seed + 1),
        lambda: evaluate(args, draft, tokenizer, validation, target),
    )
    export(draft, tokenizer, args.out / "draft", args.context)


if __name__ == "__main__":
    main()
