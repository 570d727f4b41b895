"""Says what the adjustments of a sequence's logits depend on, the same for every runner."""

from truedraft.engine.core.sequence import Sequence
from truedraft.engine.sampling.adjust import History
from truedraft.engine.sampling.rules import GenerationRules


def history_of(sequence: Sequence, rules: GenerationRules) -> History:
    """Returns it for all of the sequence's rounds: the history follows its tokens by itself."""
    return History(
        params=sequence.params,
        token_ids=sequence.token_ids,
        num_prompt_tokens=sequence.num_prompt_tokens,
        stop_token_ids=sequence.stop_token_ids,
        num_encoder_tokens=sequence.num_encoder_tokens,
        rules=rules,
        matcher=sequence.matcher,
    )
