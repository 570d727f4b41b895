r"""Train a small hybrid: three layers of Gated DeltaNet to one of attention, and an MTP head on top.

    python tools/train_hybrid.py --corpus stories.train.txt --validation stories.valid.txt \
        --work-dir runs/hybrid --out runs/hybrid/model --minutes 20

It has the layout of Qwen 3.5's text models, the tokenizer of the bundled pair, and the embeddings and MLPs of
its target to start with, from whose distributions it is distilled: so minutes of a CPU are enough for a model
that tells stories. The head learns along with it. The folder is a checkpoint with a card and the arguments.
A stopped run goes on from its last checkpoint.
"""

import argparse
import json
import shutil
from pathlib import Path
from types import SimpleNamespace

import torch
from safetensors.torch import load_file, save_file
from story_data import StoryStream, read_stories
from tokenizers import Tokenizer
from torch import nn
from train_demo_pair import Trainer, compute_dtype, evaluate
from transformers import LlamaForCausalLM, Qwen3_5ForCausalLM, Qwen3_5TextConfig, logging
from transformers.models.qwen3_5.modeling_qwen3_5 import Qwen3_5DecoderLayer, Qwen3_5RMSNorm

from truedraft.engine.config import BUNDLED_PAIR

TEACHER = BUNDLED_PAIR / "target"
# The loss is the model's, and so much of the head's, whose tokens are only drafts.
HEAD_SHARE = 0.3


CARD = """# A small hybrid that tells stories

Three layers of Gated DeltaNet to one of attention, in the layout of Qwen 3.5's text models, and an MTP head
(`mtp.*`) that predicts one token further. It knows nothing but simple stories in English. It is here to try
what only a trained hybrid shows: acceptance, and what a draft, n-grams, `self:int4` or the head gain.

| | |
|---|---|
| parameters | {parameters:,}, of which the head has {head:,} |
| training tokens | {tokens:,} |
| training minutes, one thread of a busy CPU | {minutes:.0f} |
| validation loss, nats per token | {validation_loss:.3f} |
| mean overlap with its teacher, 1 - TV | {overlap:.3f} |

Trained by `tools/train_hybrid.py` with the arguments in `arguments.json`. Tokenizer, embeddings and MLPs come
from the bundled target, whose distributions it was distilled from; weights are in float16.

## Data

The stories of the bundled pair: excerpts of TinyStories V1 (CDLA-Sharing-1.0), African Storybook and Pratham
Books (CC-BY 4.0, credits in `engine/demo_pair/ATTRIBUTION.tsv`), TinyFabulist (MIT). See also `NOTICE`.
"""


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--corpus", type=Path, required=True)
    parser.add_argument("--validation", type=Path, required=True)
    parser.add_argument("--work-dir", type=Path, required=True, help="checkpoints and the log")
    parser.add_argument("--out", type=Path, required=True, help="receives the model")
    parser.add_argument("--minutes", type=float, default=20)
    parser.add_argument("--layers", type=int, default=8, help="every fourth one attends")
    parser.add_argument("--tokens-per-step", type=int, default=2048)
    parser.add_argument("--window", type=int, default=256, help="first 75 %% of the time")
    parser.add_argument("--final-window", type=int, default=512, help="the rest")
    parser.add_argument("--chat-share", type=float, default=0.3)
    parser.add_argument("--matrix-lr", type=float, default=0.02)
    parser.add_argument("--other-lr", type=float, default=2e-3)
    parser.add_argument("--weight-decay", type=float, default=0.05)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--precision", choices=["auto", "float32", "bfloat16"], default="auto")
    return parser.parse_args()


def make_config(teacher: LlamaForCausalLM, layers: int) -> Qwen3_5TextConfig:
    like = teacher.config
    return Qwen3_5TextConfig(
        vocab_size=like.vocab_size,
        hidden_size=like.hidden_size,
        intermediate_size=like.intermediate_size,
        num_hidden_layers=layers,
        num_attention_heads=3,
        num_key_value_heads=1,
        head_dim=64,
        linear_num_key_heads=2,
        linear_num_value_heads=4,
        linear_key_head_dim=64,
        linear_value_head_dim=64,
        max_position_embeddings=like.max_position_embeddings,
        rope_parameters={
            "rope_type": "default",
            "rope_theta": 10_000.0,
            "partial_rotary_factor": 0.25,
            "mrope_section": [3, 3, 2],
        },
        tie_word_embeddings=True,
        bos_token_id=like.bos_token_id,
        eos_token_id=like.eos_token_id,
        mtp_num_hidden_layers=1,
    )


class Head(nn.Module):
    """Predicts the token after the next one, from the model's last states and the next token; its tensors
    have the names that Qwen 3.5's checkpoints give them."""

    def __init__(self, config: Qwen3_5TextConfig) -> None:
        super().__init__()
        size, eps = config.hidden_size, config.rms_norm_eps
        self.fc = nn.Linear(2 * size, size, bias=False)
        self.pre_fc_norm_embedding = Qwen3_5RMSNorm(size, eps)
        self.pre_fc_norm_hidden = Qwen3_5RMSNorm(size, eps)
        self.layers = nn.ModuleList([Qwen3_5DecoderLayer(config, config.layer_types.index("full_attention"))])
        self.norm = Qwen3_5RMSNorm(size, eps)

    def forward(
        self, model: Qwen3_5ForCausalLM, hidden: torch.Tensor, next_ids: torch.Tensor
    ) -> torch.Tensor:
        embedded = self.pre_fc_norm_embedding(model.model.embed_tokens(next_ids))
        x = self.fc(torch.cat([embedded, self.pre_fc_norm_hidden(hidden)], dim=-1))
        length = x.shape[1]
        angles = model.model.rotary_emb(x, torch.arange(length, device=x.device)[None])
        mask = torch.full((length, length), -torch.inf, dtype=x.dtype, device=x.device).triu(1)
        x = self.layers[0](x, position_embeddings=angles, attention_mask=mask[None, None])
        logits: torch.Tensor = model.lm_head(self.norm(x))
        return logits


class WithHead(nn.Module):
    """Is the model to its trainer; ``ahead`` are the head's logits of the last forward."""

    def __init__(self, config: Qwen3_5TextConfig) -> None:
        super().__init__()
        self.model = Qwen3_5ForCausalLM._from_config(config, attn_implementation="eager")
        self.mtp = Head(config)
        self.ahead = torch.empty(0)

    def forward(self, input_ids: torch.Tensor, use_cache: bool = False) -> SimpleNamespace:
        hidden = self.model.model(input_ids=input_ids, use_cache=use_cache).last_hidden_state
        if self.training:
            self.ahead = self.mtp(self.model, hidden[:, :-1], input_ids[:, 1:])
        return SimpleNamespace(logits=self.model.lm_head(hidden))


@torch.no_grad()
def begin_like(teacher: LlamaForCausalLM, student: WithHead) -> None:
    """Copies what both have: embeddings, the last norm, and each MLP with its norm."""
    model, norm_of = student.model.model, teacher.model.norm
    model.embed_tokens.load_state_dict(teacher.model.embed_tokens.state_dict())
    model.norm.weight.copy_(norm_of.weight - 1)
    step = len(teacher.model.layers) / len(model.layers)
    for place, layer in enumerate([*model.layers, *student.mtp.layers]):
        source = teacher.model.layers[min(int((place + 1) * step) - 1, len(teacher.model.layers) - 1)]
        layer.mlp.load_state_dict(source.mlp.state_dict())
        layer.post_attention_layernorm.weight.copy_(source.post_attention_layernorm.weight - 1)
    student.mtp.norm.weight.copy_(norm_of.weight - 1)


def cross_entropy(logits: torch.Tensor, probs: torch.Tensor) -> torch.Tensor:
    return -(probs * logits.float().log_softmax(-1)).sum(-1).mean()


def export(args: argparse.Namespace, student: WithHead, measured: dict[str, float]) -> None:
    """Writes a checkpoint folder with its card, and the weights in float16."""
    args.out.mkdir(parents=True, exist_ok=True)
    student.model.half().save_pretrained(args.out)
    path = args.out / "model.safetensors"
    head = {f"mtp.{name}": tensor.half() for name, tensor in student.mtp.state_dict().items()}
    save_file({**load_file(path), **head}, path, metadata={"format": "pt"})
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "generation_config.json"):
        shutil.copy(TEACHER / name, args.out / name)
    values = {k: v.name if isinstance(v, Path) else v for k, v in vars(args).items()}
    (args.out / "arguments.json").write_text(json.dumps(values, indent=1) + "\n")
    sizes = {"parameters": count(student), "head": count(student.mtp)}
    (args.out / "README.md").write_text(CARD.format(**sizes, **measured))


def count(module: nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())


def main() -> None:
    args = parse_arguments()
    logging.set_verbosity_error()
    torch.manual_seed(args.seed)
    torch.set_num_threads(args.threads)
    args.work_dir.mkdir(parents=True, exist_ok=True)
    tokenizer = Tokenizer.from_file(str(TEACHER / "tokenizer.json"))
    teacher = LlamaForCausalLM.from_pretrained(TEACHER, dtype=torch.float32).to(args.device)
    teacher.eval().requires_grad_(False)
    student = WithHead(make_config(teacher, args.layers)).to(args.device)
    begin_like(teacher, student)
    print(f"{count(student):,} parameters, {compute_dtype(args)} on {args.device}")

    def loss(logits: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            probs = teacher(input_ids=ids[:, :-1], use_cache=False).logits.float().softmax(-1)
        # The head predicts, one token late, what the teacher predicts with that token.
        return cross_entropy(logits, probs) + HEAD_SHARE * cross_entropy(student.ahead, probs[:, 1:])

    def validate() -> dict[str, float]:
        student.eval()
        measured = evaluate(args, student, tokenizer, validation[:64], teacher)
        student.train()
        return measured

    validation = read_stories(args.validation)
    trainer = Trainer(args, "hybrid", student, loss)
    stream = StoryStream(tokenizer, read_stories(args.corpus), args.chat_share, args.seed)
    trainer.run(args.minutes, stream, validate)
    export(args, student, {**validate(), "tokens": trainer.tokens, "minutes": trainer.elapsed / 60})


if __name__ == "__main__":
    main()
