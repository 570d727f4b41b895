"""Checks once after loading that a model computes the same over our cache as by itself, with a few tokens.

Texts of ``probe_texts`` go through the cache in chunks, packed side by side, as in serving; transformers' own
eager attention computes each of them at once, by itself. Hidden habits of an architecture show then:
positions counted from somewhere else, rotary factors that follow the longest text, biases that are not
announced, states and convolutions that reach from one token to the next.
"""

from typing import Any

import torch

from truedraft.engine.errors import ModelLoadError
from truedraft.engine.layers.attention import ATTENTION_NAME
from truedraft.engine.models.hf.decoder_only import DecoderModel
from truedraft.engine.models.probe_texts import ProbeText, packed_logits, probe_texts

# A row of logits may deviate by this share of its spread. Rounding makes some 1e-5 in float32 and 1e-2 in
# bfloat16; a wrong mask or position makes 0.1 to 1.
# A rounding in 16 bits, or a token that goes to other experts, may change the rest of a text.
MOST_ROWS = 0.85
TOLERANCES = {torch.float32: 0.01, torch.float16: 0.1, torch.bfloat16: 0.3}


@torch.inference_mode()
def self_check(model: DecoderModel) -> None:
    """Raises ``ModelLoadError`` if the results of ``model`` over our cache deviate from its own."""
    model_type = model.config.model_type
    texts = probe_texts(model.facts)
    expected = [text.compared(_alone(model, text)) for group in texts for text in group]
    if not all(logits.isfinite().all() for logits in expected):
        raise ModelLoadError(
            f"the model's own logits are not finite in {str(model.dtype).removeprefix('torch.')}: "
            "its weights are broken, or it needs another dtype"
        )
    # Rounding sends a token to other experts now and then, which changes it altogether.
    has_experts = any(name.endswith("experts") for name, _ in model.module.named_modules())
    share = 1.0 if model.dtype == torch.float32 and not has_experts else MOST_ROWS
    found = [*map(_deviations, packed_logits(model, texts), expected)]
    deviation = max(float(rows.quantile(share)) for rows in found)
    if any(rows.isnan().any() for rows in found):
        deviation = float("nan")
    if not deviation <= TOLERANCES[model.dtype]:
        raise ModelLoadError(
            f"{model_type} models of this kind cannot be served: over our cache the logits deviate by "
            f"{deviation:.1%} from the model's own, so something in it does not go through its attention"
        )


def _deviations(got: torch.Tensor, expected: torch.Tensor) -> torch.Tensor:
    spread = (expected - expected.mean(-1, keepdim=True)).norm(dim=-1)
    found: torch.Tensor = (got - expected).norm(dim=-1) / spread.clamp(min=1e-6)
    return found


def _alone(model: DecoderModel, text: ProbeText) -> torch.Tensor:
    """Returns logits [tokens, vocab], float32, by transformers alone."""
    hf_model: Any = model.module
    hf_model.set_attn_implementation("eager")
    try:
        ids = torch.tensor([text.token_ids], device=model.device)
        # The model itself numbers the tokens of a text from the beginning in the same way.
        more = {"position_ids": text.positions(model.device)[None]} if text.first_position else {}
        output = hf_model(input_ids=ids, use_cache=False, **more)
        return output.logits[0].float()  # type: ignore[no-any-return]
    except Exception as error:
        raise ModelLoadError(
            f"the model cannot be run by transformers alone ({type(error).__name__}: {error})"
        ) from error
    finally:
        hf_model.set_attn_implementation(ATTENTION_NAME)
