"""A pair of random models of any shape whose acceptance is dialled: real costs without real weights.

    python -m benchmarks.synthetic_pair --out /tmp/pair --acceptance 0.8 [--hidden 1024 --layers 24 ...]

Residual branches are scaled to almost nothing, so the last hidden state is the token's own embedding, and
the head maps each embedding to one fixed successor. The draft has another successor for a share of the
tokens: greedily it is right about ``acceptance`` of them, wherever it stands. Every product of the real
shape is still computed.
"""

import argparse
from dataclasses import dataclass
from pathlib import Path

import torch
from transformers import LlamaConfig, LlamaForCausalLM

RESIDUAL_SCALE = 1e-3


@dataclass(frozen=True)
class Shape:
    hidden: int
    layers: int
    heads: int
    kv_heads: int
    mlp: int


# The pair of the project's speed goals: 290M and 5.6M parameters.
TARGET = Shape(hidden=1024, layers=24, heads=16, kv_heads=8, mlp=2688)
DRAFT = Shape(hidden=256, layers=2, heads=4, kv_heads=4, mlp=688)
VOCAB_SIZE = 8192
CONTEXT = 2048


def successors(vocab_size: int, seed: int) -> torch.Tensor:
    """A random cycle through all tokens: next token of each, [vocab]."""
    order = torch.randperm(vocab_size, generator=torch.Generator().manual_seed(seed))
    following = torch.empty_like(order)
    following[order] = order.roll(-1)
    return following


def mistaken(following: torch.Tensor, acceptance: float, seed: int) -> torch.Tensor:
    """``following`` with another successor for a share ``1 - acceptance`` of the tokens, spread at random."""
    vocab_size = len(following)
    shuffled = torch.randperm(vocab_size, generator=torch.Generator().manual_seed(seed + 1))
    wrong = shuffled[: round((1 - acceptance) * vocab_size)]
    result = following.clone()
    result[wrong] = (following[wrong] + 1) % vocab_size
    return result


@torch.no_grad()
def build(shape: Shape, vocab_size: int, following: torch.Tensor, seed: int) -> LlamaForCausalLM:
    """A model that greedily says ``following[token]`` after each token."""
    torch.manual_seed(seed)
    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=vocab_size,
            hidden_size=shape.hidden,
            intermediate_size=shape.mlp,
            num_hidden_layers=shape.layers,
            num_attention_heads=shape.heads,
            num_key_value_heads=shape.kv_heads,
            max_position_embeddings=CONTEXT,
            tie_word_embeddings=False,
            bos_token_id=None,
            eos_token_id=None,
            pad_token_id=None,
        )
    )
    embeddings = torch.randn(vocab_size, shape.hidden)
    model.model.embed_tokens.weight.copy_(embeddings)
    model.lm_head.weight[following] = embeddings / shape.hidden**0.5
    for layer in model.model.layers:
        layer.self_attn.o_proj.weight.mul_(RESIDUAL_SCALE)
        layer.mlp.down_proj.weight.mul_(RESIDUAL_SCALE)
    return model


def save_pair(
    folder: Path,
    acceptance: float,
    target: Shape = TARGET,
    draft: Shape = DRAFT,
    vocab_size: int = VOCAB_SIZE,
    seed: int = 0,
) -> tuple[str, str]:
    """Write ``folder/target`` and ``folder/draft``; returns both paths."""
    following = successors(vocab_size, seed)
    build(target, vocab_size, following, seed).save_pretrained(folder / "target")
    guesses = mistaken(following, acceptance, seed)
    build(draft, vocab_size, guesses, seed + 1).save_pretrained(folder / "draft")
    return str(folder / "target"), str(folder / "draft")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--acceptance", type=float, default=0.8)
    parser.add_argument("--vocab-size", type=int, default=VOCAB_SIZE)
    parser.add_argument("--seed", type=int, default=0)
    for role, shape in (("target", TARGET), ("draft", DRAFT)):
        for name, value in vars(shape).items():
            parser.add_argument(f"--{role}-{name.replace('_', '-')}", type=int, default=value)
    args = vars(parser.parse_args())

    def shape(role: str) -> Shape:
        return Shape(**{name: args[f"{role}_{name}"] for name in vars(TARGET)})

    target, draft = save_pair(
        args["out"], args["acceptance"], shape("target"), shape("draft"), args["vocab_size"], args["seed"]
    )
    print(f"{target}\n{draft}")


if __name__ == "__main__":
    main()
