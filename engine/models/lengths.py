"""Says how long texts may be, by the settings and by the models."""

from truedraft.engine.config import EngineConfig
from truedraft.engine.core.admission import EncoderDecoderLimits
from truedraft.engine.errors import ModelLoadError
from truedraft.engine.models.base import Model
from truedraft.engine.models.hf.encoder_decoder import EncoderDecoderModel


def max_model_len_of(config: EngineConfig, target: Model) -> int:
    """Returns the longest text, prompt and output together; raises ``ModelLoadError`` if the settings ask for
    more than the target's context."""
    context = target.max_position
    if config.max_model_len is None:
        if context is None:
            raise ModelLoadError("the target does not say how long its context is; set max_model_len")
        return context
    if context is not None and config.max_model_len > context:
        raise ModelLoadError(f"max_model_len is {config.max_model_len}, the target's context only {context}")
    return config.max_model_len


def limits_of(config: EngineConfig, target: EncoderDecoderModel, draft: Model | None) -> EncoderDecoderLimits:
    """Returns the limits of both texts: ``max_model_len`` bounds the prompt and the output, each; with
    relative positions any length is possible."""
    context = config.max_model_len or target.max_position or target.usual_length
    if context is None:
        raise ModelLoadError(
            "the target does not say how long prompts and outputs may be; set max_model_len, for each"
        )
    for name, model in (("target", target), ("draft", draft)):
        if model is not None and model.max_position is not None and context > model.max_position:
            raise ModelLoadError(
                f"prompt and output may have {context} tokens each (max_model_len), "
                f"the {name} reads and writes only {model.max_position}"
            )
    return EncoderDecoderLimits(
        start_ids=tuple(target.start_ids),
        max_prompt_len=context,
        max_output_len=context - len(target.start_ids),
        forced_eos_token_id=target.rules.forced_eos_token_id,
    )
