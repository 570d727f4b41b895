"""Decides whether a draft is a head, and of which kind, and loads it."""

from truedraft.engine.messages import ASSISTANT, EAGLE, MTP, Method
from truedraft.engine.models.base import Model
from truedraft.engine.models.heads.assistant_file import is_assistant
from truedraft.engine.models.heads.eagle import load_eagle
from truedraft.engine.models.heads.eagle_config import read_eagle_config
from truedraft.engine.models.heads.head import Head
from truedraft.engine.models.heads.mtp import holds_mtp_alone, load_mtp
from truedraft.engine.models.options import LoadOptions


def head_method(draft: str) -> Method | None:
    """Returns the name of drafting with the setting ``draft``, if that names a head: the target's own, or one
    at a path."""
    if draft == MTP or holds_mtp_alone(draft):
        return MTP
    if is_assistant(draft):
        return ASSISTANT
    return None if read_eagle_config(draft) is None else EAGLE


def load_head(draft: str, target: Model, target_path: str, options: LoadOptions) -> Head | None:
    """Loads the head that ``draft`` names; None if it names none, or an assistant."""
    match head_method(draft):
        case "mtp":
            return load_mtp(target_path if draft == MTP else draft, target, options)
        case "eagle":
            config = read_eagle_config(draft)
            assert config is not None
            return load_eagle(config, target, options)
    return None
