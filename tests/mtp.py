"""MTP heads by their definition: a layer of transformers', fed with the target's states."""

from collections.abc import Sequence
from copy import deepcopy
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import AutoModelForCausalLM

# Names in Qwen's layout and in DeepSeek's, of what is around the layer.
QWEN = {"fc": "fc", "enorm": "pre_fc_norm_embedding", "hnorm": "pre_fc_norm_hidden", "norm": "norm"}
DEEPSEEK = {"fc": "eh_proj", "enorm": "enorm", "hnorm": "hnorm", "norm": "shared_head.norm"}


class NaiveMtp(nn.Module):
    """Computes whole texts anew. ``model`` is the target as transformers loads it, whose embeddings, angles
    and output layer the head shares."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        config = deepcopy(model.config)
        config.first_k_dense_replace, config.mlp_only_layers = 0, []  # a layer of experts, if there are some
        if hasattr(config, "mlp_layer_types"):
            config.mlp_layer_types = ["sparse"] * config.num_hidden_layers
        kinds = getattr(config, "layer_types", None) or ["full_attention"]
        norm, size = type(model.model.norm), config.hidden_size
        self.fc = nn.Linear(2 * size, size, bias=False)
        self.enorm, self.hnorm, self.norm = (norm(size, config.rms_norm_eps) for _ in range(3))
        self.layer = type(model.model.layers[0])(config, kinds.index("full_attention"))
        self.target = [model]  # no part of it

    @torch.no_grad()
    def draft(
        self, token_ids: Sequence[int], states: torch.Tensor, num_tokens: int, drafted: Sequence[int] = ()
    ) -> list[int]:
        """Returns the most likely drafts after a text, of all of whose tokens but the last ``states`` are
        known. Only the tokens ``drafted`` are, or all."""
        allowed = torch.tensor(drafted or range(self.target[0].config.vocab_size))
        ids, drafts = list(token_ids[1:]), []
        for _ in range(num_tokens):
            output = self.norm(self.hidden(ids, states))[-1:]
            logits = self.target[0].lm_head(output)[0]
            drafts.append(int(allowed[logits[allowed].argmax()]))
            ids.append(drafts[-1])
            states = torch.cat((states, output))
        return drafts

    def hidden(self, ids: Sequence[int], states: torch.Tensor) -> torch.Tensor:
        """Returns the layer's output for each of ``states``, which come with the tokens after theirs."""
        model = self.target[0].model
        embedded = model.embed_tokens(torch.tensor(ids))
        x = self.fc(torch.cat((self.enorm(embedded), self.hnorm(states)), -1))[None]
        angles = model.rotary_emb(x, torch.arange(len(ids))[None])
        mask = torch.full((len(ids), len(ids)), -torch.inf).triu(1)[None, None]
        found = self.layer(x, position_embeddings=angles, attention_mask=mask)
        return (found[0] if isinstance(found, tuple) else found)[0]

    def named_tensors(
        self, layout: dict[str, str], layer: str = "", *, stacks: bool = False
    ) -> dict[str, torch.Tensor]:
        """Returns the head's tensors, below ``layer`` those of the layer; experts are in ``stacks`` or
        apart."""
        tensors = {}
        for name, tensor in self.state_dict().items():
            part, _, rest = name.partition(".")
            if part != "layer":
                tensors[f"{layout[part]}.{rest}"] = tensor
            elif stacks:
                tensors[layer + rest] = tensor
            elif rest.endswith("experts.gate_up_proj"):
                for number, (gate, up) in enumerate(each.chunk(2) for each in tensor):
                    prefix = f"{layer}{rest.removesuffix('gate_up_proj')}{number}."
                    tensors |= {f"{prefix}gate_proj.weight": gate, f"{prefix}up_proj.weight": up}
            elif rest.endswith("experts.down_proj"):
                prefix = f"{layer}{rest.removesuffix('down_proj')}"
                tensors |= {f"{prefix}{number}.down_proj.weight": each for number, each in enumerate(tensor)}
            else:
                tensors[layer + rest] = tensor
        return tensors


def load_target(folder: str) -> Any:
    return AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, attn_implementation="eager"
    ).eval()


def trained_head(folder: str) -> NaiveMtp:
    """Reads the head of a checkpoint in Qwen's layout."""
    head = NaiveMtp(load_target(folder))
    stored = {name: tensor.float() for name, tensor in load_file(Path(folder, "model.safetensors")).items()}
    names = {f"mtp.{theirs}.weight": f"{ours}.weight" for ours, theirs in QWEN.items()}
    found = {
        names.get(name, name.replace("mtp.layers.0", "layer")): tensor
        for name, tensor in stored.items()
        if name.startswith("mtp.")
    }
    head.load_state_dict(found)
    return head.eval()


@torch.no_grad()
def random_head(target: Any, seed: int = 3) -> NaiveMtp:
    """Makes one whose guesses depend on all of its inputs; ``target`` is a folder or a module."""
    torch.manual_seed(seed)
    head = NaiveMtp(load_target(target) if isinstance(target, str) else target)
    for name, parameter in head.named_parameters():
        spread = 0.3 if parameter.dim() == 1 else 1.5 * parameter.shape[-1] ** -0.5
        parameter.copy_(torch.randn_like(parameter) * spread + (parameter.dim() == 1 and "norm" in name))
    return head.eval()


def add_to_checkpoint(folder: str, tensors: dict[str, torch.Tensor]) -> None:
    path = Path(folder, "model.safetensors")
    found = {name: tensor.contiguous().clone() for name, tensor in tensors.items()}
    save_file(load_file(path) | found, path, metadata={"format": "pt"})
