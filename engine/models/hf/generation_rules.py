"""Translates a checkpoint's generation config into the engine's own terms.

It takes only settings that change which tokens are possible: how the decoder starts, which tokens are banned
or forced. Beam search and lengths are for the request to say. Settings that would change the text and are not
served are refused at load.
"""

from typing import Any

from truedraft.engine.errors import ModelLoadError
from truedraft.engine.models.base import eos_token_ids
from truedraft.engine.sampling.rules import GenerationRules

# No rule of ours stands for these settings of ``generate``; with these values they change nothing.
NOT_SERVED: dict[str, tuple[object, ...]] = {
    "begin_suppress_tokens": (None, []),
    "encoder_no_repeat_ngram_size": (None, 0),
    "encoder_repetition_penalty": (None, 1.0),
    "exponential_decay_length_penalty": (None,),
    "forced_decoder_ids": (None, []),
    "guidance_scale": (None, 1.0),
    "sequence_bias": (None, {}),
}


def decoder_start_ids(model: Any) -> list[int]:
    """Returns the decoder's tokens before its first own one: the start token, and a forced first one."""
    start = _first(model, "decoder_start_token_id", "bos_token_id")
    if start is None:
        raise ModelLoadError(
            f"{model.config.model_type}: neither config.json nor generation_config.json says how the decoder "
            "starts (decoder_start_token_id)"
        )
    if not isinstance(start, int):
        raise ModelLoadError(f"decoder_start_token_id is {start}, where one token is needed")
    forced = _setting(model, "forced_bos_token_id")
    return [start] if forced is None else [start, int(forced)]


def generation_rules(model: Any) -> GenerationRules:
    """Returns the rules; raises ``ModelLoadError`` if the generation config asks for something that is not
    served."""
    for name, neutral in NOT_SERVED.items():
        value = _setting(model, name)
        if value not in neutral:
            raise ModelLoadError(f"the generation config asks for {name} = {value}, which is not served")
    banned = set(_setting(model, "suppress_tokens") or [])
    for word in _setting(model, "bad_words_ids") or []:
        if len(word) != 1:
            raise ModelLoadError(
                f"the generation config bans the sequence {word} (bad_words_ids); only single tokens can be"
            )
        # ``generate`` lets a model write its own end.
        banned |= set(word) - eos_token_ids(model.generation_config, model.config)
    forced = _setting(model, "forced_eos_token_id")
    if isinstance(forced, list):
        if len(forced) != 1:
            raise ModelLoadError(f"forced_eos_token_id is {forced}, where one token is needed")
        forced = forced[0]
    return GenerationRules(
        banned_token_ids=tuple(sorted(banned)),
        no_repeat_ngram_size=int(_setting(model, "no_repeat_ngram_size") or 0),
        forced_eos_token_id=forced,
    )


def _setting(model: Any, name: str) -> Any:
    """Returns a value of the generation config; transformers fills it from config.json where there is no such
    file."""
    return getattr(model.generation_config, name, None)


def _first(model: Any, *names: str) -> Any:
    for name in names:
        for config in (model.generation_config, model.config):
            if (value := getattr(config, name, None)) is not None:
                return value
    return None
