"""Reads what a folder says of an EAGLE-3 head: a flat config.json, or one of parts."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from transformers import AutoConfig, GenerationConfig

from truedraft.engine.checkpoints.account import Account
from truedraft.engine.checkpoints.checkpoint import locate
from truedraft.engine.errors import ModelLoadError
from truedraft.engine.models.load_errors import stage
from truedraft.engine.models.sizes import check_largest

# Layers of heads are of these kinds.
LAYER_TYPES = ("llama", "qwen3")
OPTIONS = ("norm_before_residual", "norm_before_fc", "fc_norm", "norm_output")
LAYER_IDS = "eagle_aux_hidden_state_layer_ids"
# These settings change a head. Each is served only with the values here, which describe what is done anyway.
SERVED: dict[str, tuple[Any, ...]] = {
    "use_aux_hidden_state": (True,),
    "use_input_layernorm_in_first_layer": (True,),
    "use_last_layernorm": (True,),
    "use_mtp_layernorm": (False,),
    "next_layer_regular": (True,),
    "parallel_drafting": (False,),
    "parallel_draft_step": (0, 1),
    "parallel_draft_heads_num_layers": (0, 1),
}
# These settings are read here, or describe the file and how a head was trained.
READ = (*OPTIONS, LAYER_IDS, "aux_hidden_state_layer_ids", "draft_vocab_size", "target_hidden_size")
OF_THE_FILE = (
    *("architectures", "auto_map", "dtype", "torch_dtype", "transformers_version", "speculators_version"),
    *("speculators_model_type", "speculators_config", "transformer_layer_config", "eagle_config"),
    *("target_model_type", "_name_or_path", "embed_requires_grad", "has_no_defaults_at_init", "has_lm_head"),
)
# Versions of transformers have these names for settings of angles.
ANGLES = ("rope_theta", "rope_scaling", "rope_parameters")


@dataclass(frozen=True)
class EagleConfig:
    """Describes a head. ``layer`` is the config of a model of its one layer. ``layer_inputs`` are the layers
    of the target whose inputs the head reads; None: the usual ones.

    ``norm_before_residual``: attention adds to the state's norm instead of the state. ``norm_before_fc``
    norms the target's states together, ``fc_norm`` each layer's by themselves. ``norm_output``: the head's
    next step gets its last norm's output instead of the norm's input.
    """

    path: str
    layer: Any
    draft_vocab_size: int
    target_hidden_size: int | None
    layer_inputs: tuple[int, ...] | None
    norm_before_residual: bool
    norm_before_fc: bool
    fc_norm: bool
    norm_output: bool

    def taps(self, num_layers: int) -> tuple[int, ...]:
        """Returns the target's layers whose outputs the head reads."""
        inputs = self.layer_inputs or (2, num_layers // 2, num_layers - 3)
        if not all(1 <= layer <= num_layers for layer in inputs):
            raise ModelLoadError(
                f"{self.path} reads the states that layers {list(inputs)} get, as {LAYER_IDS} in its "
                f"config.json says or by default; the target has layers 1 to {num_layers - 1} after the first"
            )
        return tuple(layer - 1 for layer in inputs)


def read_eagle_config(path: str) -> EagleConfig | None:
    """Returns the config of the head at ``path``, a folder or a hub id; None if it holds something else.

    Raises ``ModelLoadError`` for heads of other kinds.
    """
    try:
        file = locate(str(Path(path).expanduser()) if path.startswith("~") else path, "config.json")
    # The path is a file, or no name of a repository: loading reports faults, if there are any.
    except OSError:
        return None
    if file is None:
        return None
    try:
        config = json.loads(Path(file).read_text())
    except ValueError:
        return None  # Loading reports the fault.
    if not isinstance(config, dict):
        return None
    with stage(path, "config.json"):
        check_largest(path, config)
        return _read(path, config)


def _read(path: str, config: dict[str, Any]) -> EagleConfig | None:
    if "speculators_model_type" in config:
        return _of_parts(path, config)
    names = [str(name).lower() for name in config.get("architectures") or ()]
    if not any("eagle" in name for name in names):
        return None
    if not any("eagle3" in name for name in names):
        raise ModelLoadError(
            f"{path} is a head of EAGLE's first versions, which is not served: take EAGLE-3's"
        )
    # Options may be in a part of their own.
    merged = config | (config.get("eagle_config") or {})
    return _config(path, merged, config, norm_before_residual=False)


def _of_parts(path: str, config: dict[str, Any]) -> EagleConfig:
    kind = config["speculators_model_type"]
    layer = config.get("transformer_layer_config")
    if kind != "eagle3" or not isinstance(layer, dict):
        raise ModelLoadError(f"{path} is a head of the type {kind!r}; heads of the type 'eagle3' are served")
    return _config(path, config, layer, norm_before_residual=True)


def _config(
    path: str, options: dict[str, Any], layer: dict[str, Any], *, norm_before_residual: bool
) -> EagleConfig:
    """Returns the config; ``norm_before_residual`` is the default where the file has no such setting."""
    kind = layer.get("model_type", "llama")
    if kind not in LAYER_TYPES or layer.get("num_hidden_layers", 1) != 1:
        raise ModelLoadError(
            f"{path} cannot be served: a head has one layer of the type {' or '.join(LAYER_TYPES)}, "
            f"not {layer.get('num_hidden_layers', 1)} of the type {kind!r}"
        )
    outside = ("model_type", "architectures", "num_hidden_layers", "eagle_config")
    settings = {name: value for name, value in layer.items() if name not in outside}
    ends = {
        "bos_token_id": None,
        "eos_token_id": None,
        "pad_token_id": None,
    }  # These settings concern the target.
    made = AutoConfig.for_model(kind, **settings | ends, num_hidden_layers=1)
    _check_all(path, options | layer, made)
    flags = {name: bool(options.get(name, False)) for name in OPTIONS}
    flags["norm_before_residual"] = bool(options.get("norm_before_residual", norm_before_residual))
    return EagleConfig(
        path=path,
        layer=made,
        draft_vocab_size=int(options.get("draft_vocab_size") or made.vocab_size),
        target_hidden_size=options.get("target_hidden_size"),
        layer_inputs=_layer_inputs(path, options),
        **flags,
    )


def _check_all(path: str, settings: dict[str, Any], layer: Any) -> None:
    """Raises ``ModelLoadError`` for a setting that is neither served nor known to change nothing."""
    source = f"{path} (config.json)"
    account = Account(source, {name: value for name, value in settings.items() if value is not None})
    for name, values in SERVED.items():
        account.expect(name, *values)
    for name in (*READ, *OF_THE_FILE, *ANGLES, *layer.to_diff_dict(), *GenerationConfig().to_dict()):
        account.take(name)
    for name in type(layer)().to_dict():
        account.take(name)
    account.close("has {name} = {value}, which is not known of a head: take it out if it changes nothing")


def _layer_inputs(path: str, options: dict[str, Any]) -> tuple[int, ...] | None:
    """Returns the layers whose inputs are meant.

    Some files count outputs instead: as heads that read inputs begin with the third layer, a first id of 1
    shows which.
    """
    ids = options.get(LAYER_IDS) or options.get("aux_hidden_state_layer_ids")
    if not ids:
        return None
    if not isinstance(ids, list) or not all(type(layer) is int for layer in ids):
        raise ModelLoadError(
            f"{path} has {LAYER_IDS} {ids!r} in its config.json: numbers of layers are served"
        )
    counts_outputs = ids[0] == 1
    return tuple(layer + counts_outputs for layer in ids)
