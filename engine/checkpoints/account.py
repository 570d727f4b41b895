"""Keeps an account of what a checkpoint says: every tensor and every setting is used, or refused in a
sentence.

The readers of safetensors and of GGUF files each keep one. What a model takes from a checkpoint is taken off
the account; whatever is left at the end would have changed the text of another reader, so it is refused,
unless it is listed here with the reason why it changes nothing.
"""

import re
from collections.abc import Iterable, Mapping
from typing import Any

import torch

from truedraft.engine.checkpoints.checkpoint import EMBEDDINGS, HEAD, Checkpoint
from truedraft.engine.checkpoints.stacks import stored_tensors
from truedraft.engine.errors import ModelLoadError

Shape = tuple[int, ...]

# These tensors change nothing; each has its reason after its name.
WITHOUT_EFFECT = {
    r"rotary_emb\.inv_freq$": "frequencies that follow from the config",
    r"\.(masked_bias|attn\.bias)$": "masks that GPT-2 once stored",
    r"position_ids$": "numbers from 0 on",
    r"\.[kv]_scale$": "scales of a cache in 8 bits, which is not kept so",
    r"^(model\.)?(mtp|nextn)\.": "layers that predict further tokens, which are heads of their own",
    r"^(model\.)?(vision|visual|audio|multi_modal)\w*\.": "not of the text part",
}
LISTED = re.compile("|".join(f"({pattern})" for pattern in WITHOUT_EFFECT))
# These settings name tokens, or lists of tokens, that are banned, forced or begun with.
TOKENS: tuple[str, ...] = (
    *("decoder_start_token_id", "forced_bos_token_id", "forced_eos_token_id"),
    *("suppress_tokens", "begin_suppress_tokens", "bad_words_ids"),
)
# A message shows a setting's value up to this many letters.
MAX_SHOWN = 60


class Account:
    """Keeps the entries of ``source``, a file or folder, that nobody has taken yet: shapes of tensors or
    values of settings, by name."""

    def __init__(self, source: str, entries: Mapping[str, Any]) -> None:
        self.source = source
        self.entries = dict(entries)
        self.left = dict(entries)

    def take(self, name: str, default: Any = None) -> Any:
        """Returns the value of the entry, or ``default`` if there is none, and takes it off the account."""
        self.left.pop(name, None)
        return self.entries.get(name, default)

    def expect(self, name: str, *neutral: Any) -> None:
        """Takes a setting that is served only with a value that changes nothing, unless it is taken
        already."""
        if name not in self.left:
            return
        value = self.take(name)
        if not any(_is_same(value, other) for other in neutral):
            served = " or ".join(map(shown, neutral))
            raise ModelLoadError(f"{self.source} has {name} = {shown(value)}; only {served} is served")

    def expect_shape(self, name: str, shape: Shape, said_by: str, name_there: str | None = None) -> None:
        """Takes a tensor and checks its shape; ``name_there`` is its name in the checkpoint."""
        found = self.take(name_there or name)
        if found is None:
            raise ModelLoadError(f"{self.source} lacks weights of the model: {name}")
        check_shape(self.source, name_there or name, tuple(found), shape, said_by)

    def close(self, sentence: str) -> None:
        """Raises ``ModelLoadError`` if something is left, with ``sentence``, in which ``{name}`` and
        ``{value}`` are replaced."""
        for name, value in self.left.items():
            raise ModelLoadError(f"{self.source} {sentence.format(name=name, value=shown(value))}")


def check_shape(source: str, name: str, found: Shape, needed: Shape, said_by: str) -> None:
    """Raises ``ModelLoadError`` with both shapes if they differ; ``said_by`` names the source of the needed
    one."""
    if found != needed:
        raise ModelLoadError(f"{source} has {name} of the shape {found}, but by {said_by} it is {needed}")


def untie(module: Any, checkpoint: Checkpoint) -> None:
    """Gives ``module`` (a fused family's, without weights) an output layer of its own if its config ties it
    to the embeddings, but the checkpoint has another one. transformers does the same."""
    if not module.config.tie_word_embeddings or not {EMBEDDINGS, HEAD} <= checkpoint.files.keys():
        return
    stored = checkpoint.read([EMBEDDINGS, HEAD])
    if not torch.equal(stored[EMBEDDINGS], stored[HEAD]):
        module.config.tie_word_embeddings = False
        module.lm_head.weight = torch.nn.Parameter(
            torch.empty_like(module.lm_head.weight, device="meta"), requires_grad=False
        )


def has_all(module: Any, checkpoint: Checkpoint) -> bool:
    """Tells whether ``module`` (a fused family's, without weights) can be read from the checkpoint by its
    tensors' names. Raises ``ModelLoadError`` if it can, but shapes differ or tensors are left over."""
    needed = {name: tuple(parameter.shape) for name, parameter in stored_tensors(module).items()}
    if module.config.tie_word_embeddings:
        needed.pop(HEAD, None)
    if not needed.keys() <= checkpoint.files.keys():
        return False
    for name, shape in checkpoint.shapes(needed).items():
        check_shape(checkpoint.files[name], name, shape, needed[name], "config.json")
    left = checkpoint.files.keys() - needed.keys() - checkpoint.parts
    if module.config.tie_word_embeddings:
        left -= {HEAD}  # It is the same as the embeddings.
    ignored = [*module._keys_to_ignore_on_load_unexpected, *_further_layers(module.config)]
    left = {name for name in left if not any(re.search(pattern, name) for pattern in ignored)}
    check_leftovers("", left, checkpoint)
    return True


def _further_layers(config: Any) -> list[str]:
    """Returns patterns of the tensors of layers after the last one, which predict further tokens:
    transformers' first models of these families list their numbers."""
    first, number = config.num_hidden_layers, getattr(config, "num_nextn_predict_layers", None) or 0
    return [rf"^model\.layers\.{layer}\." for layer in range(first, first + number)]


def check_loaded(path: str, found: Any, allow_pickle: bool) -> None:
    """Raises ``ModelLoadError`` if transformers reports in ``found`` that it filled weights with numbers of
    its own or left tensors out."""
    if missing := sorted(found["missing_keys"]):
        raise ModelLoadError(f"{path} lacks weights of the model: {', '.join(missing[:3])}")
    for name, stored, needed in sorted(found["mismatched_keys"]):
        check_shape(path, name, tuple(stored), tuple(needed), "config.json")
    if found["unexpected_keys"]:
        check_leftovers(path, found["unexpected_keys"], Checkpoint.find(path, allow_pickle))


def check_leftovers(source: str, names: Iterable[str], checkpoint: Checkpoint | None) -> None:
    """Raises ``ModelLoadError`` for the first tensor that a model has no use for and that might change its
    text; a bias of zeros does not. ``checkpoint`` is None if its tensors cannot be read by name."""
    for name in sorted(names):
        if LISTED.search(name):
            continue
        if checkpoint is not None and name in checkpoint.files:
            source = checkpoint.files[name]
            if name.endswith(".bias") and not checkpoint.read([name])[name].count_nonzero():
                continue
        raise ModelLoadError(
            f"{source} has a tensor {name}, which the model that its config names does not use: the config "
            "or the tensor is wrong"
        )


def check_tokens(source: str, config: Any, generation_config: Any) -> None:
    """Raises ``ModelLoadError`` if the config bans, forces or begins with a token that the vocabulary does
    not have. Ends of texts are only compared with drawn tokens, so that impossible ones do no harm."""
    text = config.get_text_config(decoder=True)
    sizes = [getattr(text, name, None) for name in ("vocab_size", "decoder_vocab_size")]
    size = max((size for size in sizes if isinstance(size, int)), default=None)
    # Decoders begin with the token that begins texts, unless they have a start token of their own.
    for name in (*TOKENS, *(["bos_token_id"] if config.is_encoder_decoder else [])):
        value = getattr(generation_config, name, None)
        value = getattr(text, name, None) if value is None else value
        if size and any(type(token) is not int or not 0 <= token < size for token in _flat(value)):
            raise ModelLoadError(
                f"{source} has {name} {shown(value)}, but the model's {size} tokens are 0 to {size - 1}"
            )


def shown(value: Any) -> str:
    """Returns the value in one line, cut where it is long."""
    text = f"{value:g}" if isinstance(value, float) else " ".join(str(value).split())
    return text if len(text) <= MAX_SHOWN else f"{text[:MAX_SHOWN]} ..."


def _is_same(value: Any, other: Any) -> bool:
    if isinstance(value, float) or isinstance(other, float):
        return isinstance(value, int | float) and abs(value - other) <= 1e-6 * max(1.0, abs(other))
    return type(value) is type(other) and bool(value == other)


def _flat(value: Any) -> Iterable[Any]:
    if isinstance(value, list | tuple | set):
        for part in value:
            yield from _flat(part)
    elif value is not None:
        yield value
