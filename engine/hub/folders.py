"""Says in one sentence what is wrong with a model's folder or file, as far as it shows before loading."""

import json
from pathlib import Path

from truedraft.engine.errors import ModelLoadError
from truedraft.engine.formats.gguf_file import is_gguf
from truedraft.engine.hub.names import FORMS, PATH_BEGINS

WEIGHTS = ("*.safetensors", "*.bin")
# Files that git-lfs leaves as pointers where it has not downloaded them, and how a pointer begins.
LARGE_FILES, POINTER = (*WEIGHTS, "*.json", "*.model"), b"version https://git-lfs.github.com/spec/"


def check_path(path: str, *, allow_pickle: bool = False) -> None:
    """Raises ``ModelLoadError`` if no model can be loaded from the file or folder ``path``."""
    place = Path(path).expanduser()
    if is_gguf(path) and not place.is_dir():
        if not place.exists():
            raise ModelLoadError(f"there is no file {path}")
        return
    if place.is_file():
        raise ModelLoadError(
            f"{path} is a file; a folder with config.json and safetensors, or a .gguf file, is needed"
        )
    if not place.is_dir():
        hint = "" if path.startswith(PATH_BEGINS) else f"; a model of the hub is {FORMS}"
        raise ModelLoadError(f"there is no file or folder {path}{hint}")
    _check_pointers(place)
    _check_files(path, place, allow_pickle)


def context_of(path: str) -> int | None:
    """Returns the number of tokens that a checkpoint's config.json allows; None where it says none, or other
    settings stretch it."""
    try:
        config = json.loads((Path(path).expanduser() / "config.json").read_text(encoding="utf-8"))
        config = config.get("text_config", config)
        is_plain = not config.get("is_encoder_decoder")
        scaling = [config.get(key) for key in ("rope_scaling", "rope_parameters")]
    except (OSError, ValueError, AttributeError):
        return None
    is_stretched = any(each and each.get("rope_type", "default") != "default" for each in scaling)
    context = config.get("max_position_embeddings")
    return context if is_plain and not is_stretched and isinstance(context, int) else None


def _check_files(path: str, folder: Path, allow_pickle: bool) -> None:
    weights = [name for pattern in WEIGHTS for name in folder.glob(pattern) if "adapter" not in name.name]
    ggufs = sorted(file.name for file in folder.iterdir() if is_gguf(file.name))
    has_config = (folder / "config.json").is_file()
    if (folder / "adapter_config.json").is_file() and not weights:
        raise ModelLoadError(
            f"{path} is a LoRA adapter of {_base_model(folder)}, not a whole model: merge it "
            "(merge_and_unload, then save_pretrained) and give the merged folder"
        )
    if not has_config and ggufs:
        raise ModelLoadError(f"{path} is a folder of GGUF files. Name one: {', '.join(ggufs[:8])}")
    if not has_config and not weights:
        raise ModelLoadError(
            f"{path} has no model: no config.json, no weights (*.safetensors), no GGUF file (*.gguf)"
        )
    if not has_config:
        raise ModelLoadError(f"{path} has weights, but no config.json")
    if not weights:
        raise ModelLoadError(f"{path} has a config.json, but no weights (*.safetensors)")
    _check_config(path, folder)
    if not allow_pickle and not any(name.suffix == ".safetensors" for name in weights):
        raise ModelLoadError(
            f"{path} has its weights only as a pickle ({weights[0].name}): convert them to safetensors, or "
            "set allow_pickle if you trust their source"
        )


def _check_config(path: str, folder: Path) -> None:
    try:
        config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise ModelLoadError(f"the config.json of {path} cannot be read: {error}") from error
    if not isinstance(config, dict):
        raise ModelLoadError(f"the config.json of {path} is no JSON object")


def _check_pointers(folder: Path) -> None:
    for file in sorted(file for pattern in LARGE_FILES for file in folder.glob(pattern) if file.is_file()):
        with file.open("rb") as opened:
            if opened.read(len(POINTER)) == POINTER:
                raise ModelLoadError(
                    f"{file} is a git-lfs pointer, not the file itself: run 'git lfs pull' in its folder"
                )


def _base_model(folder: Path) -> str:
    try:
        return str(json.loads((folder / "adapter_config.json").read_text())["base_model_name_or_path"])
    except (OSError, ValueError, KeyError, TypeError):
        return "another model"
