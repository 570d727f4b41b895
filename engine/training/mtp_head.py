"""Trains MTP heads further: how one begins, and how it is saved under a checkpoint's own names."""

import json
from dataclasses import replace
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import nn

from truedraft.engine.checkpoints.stacks import StackedCheckpoint, stored_tensors
from truedraft.engine.models.decoder import FusedDecoder
from truedraft.engine.models.heads.mtp import LAYER, layout_of, load_mtp, open_mtp
from truedraft.engine.models.load_errors import stage
from truedraft.engine.models.options import LoadOptions
from truedraft.engine.training.defaults import MTP_RATE
from truedraft.engine.training.mtp_module import MtpModule
from truedraft.engine.training.trained_head import TrainedHead, rows_of

# The module's own parts have these names in ``Parts``.
PARTS = ("projection", "embedding_norm", "state_norm", "norm")


class MtpHead(TrainedHead):
    """Is the head at ``path`` that ``load_mtp`` serves for ``target``; it is saved in ``dtype``."""

    most_drafted = float("inf")
    rate = MTP_RATE

    def __init__(self, path: str, target: FusedDecoder, options: LoadOptions, dtype: torch.dtype) -> None:
        self.target = target
        self.dtype = dtype
        self.served = load_mtp(path, target, options).model.weights
        self.embeddings = self.served.embeddings
        with stage(path, "weights"):
            self.found = open_mtp(path, target, replace(options, dtype=torch.float32))

    def module(self, token_ids: torch.Tensor | None) -> MtpModule:
        """Begins with the checkpoint's weights."""
        found, model = self.found, self.found.skeleton.model
        rotary = type(model.rotary_emb)(config=found.config)
        output = rows_of(self.served.head, self.served.norm.weight, token_ids)
        module = MtpModule(model.layers[0], model.norm, rotary, output)
        of_layer = found.layer.read(f"{LAYER}{name}" for name in stored_tensors(module.layer))
        weights = {name.replace(LAYER, "layer."): tensor for name, tensor in of_layer.items()}
        of_parts = {getattr(found.parts, part): f"{part}.weight" for part in PARTS}
        weights |= {of_parts[name]: tensor for name, tensor in found.source.read(of_parts).items()}
        # They are copies: the stored tensors stay as they are.
        copies = {name: tensor.to(torch.float32, copy=True) for name, tensor in weights.items()}
        module.load_state_dict(copies, assign=True)
        return module.requires_grad_()

    def save(self, folder: Path, module: nn.Module, token_ids: torch.Tensor | None) -> None:
        assert isinstance(module, MtpModule)
        config = self.target.config
        _, _, parts = layout_of(config)
        weights = {getattr(parts, part): module.get_parameter(f"{part}.weight") for part in PARTS}
        tensors = weights | self._of_layer(module) | self._not_shared()
        named = {
            name: tensor.detach().to("cpu", self.dtype if tensor.requires_grad else tensor.dtype).contiguous()
            for name, tensor in tensors.items()
        }
        folder.mkdir(parents=True, exist_ok=True)
        save_file(named, folder / "model.safetensors", metadata={"format": "pt"})
        described = json.loads(config.to_json_string())
        described.pop("quantization_config", None)
        (folder / "config.json").write_text(json.dumps(described, indent=2) + "\n")

    def _of_layer(self, module: MtpModule) -> dict[str, torch.Tensor]:
        """Returns the layer's tensors by their names in checkpoints of the target's family."""
        _, layer, _ = layout_of(self.target.config)
        found: dict[str, torch.Tensor] = {}
        for name, tensor in stored_tensors(module.layer).items():
            stored = {f"{LAYER}{name}": tensor}
            if isinstance(self.found.layer, StackedCheckpoint):
                stored = self.found.layer.divided(f"{LAYER}{name}", tensor)
            found |= {each.replace(LAYER, layer): part for each, part in stored.items()}
        return found

    def _not_shared(self) -> dict[str, torch.Tensor]:
        """Returns the embeddings and the output layer, if the head has others than the target."""
        ours, theirs = layout_of(self.target.config)[2], self.found.parts
        weights, of_target = self.served, self.target.weights
        names = {}
        if weights.embeddings is not of_target.embeddings:
            names[theirs.embeddings] = ours.embeddings
        if weights.head is not of_target.head:
            names[theirs.output] = ours.output
        return {names[name]: tensor for name, tensor in self.found.source.read(names).items()}
