"""Decides how many tokens of prompts a step takes, so that nobody waits long for it to end."""

from truedraft.engine.core.step import Kind, StepPlan, StepResult

# A step takes so many tokens of prompts at least, if there are any.
FEWEST_TOKENS = 16
# Steps begin with so many; it takes few of them to learn what is right.
FIRST_TOKENS = 256


class PromptPace:
    """Prompts may take ``seconds`` of a step, or as long as decoding takes if that is longer; 0: any time.

    What the last steps took decides, so a step may take up to twice as long where costs change.
    """

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds
        self._most = FIRST_TOKENS
        self._decoding = 0.0  # seconds of a round without prompts

    def within(self, budget: int) -> int:
        """Returns how many of the budget's tokens may be those of prompts."""
        return min(budget, self._most) if self.seconds else budget

    def observe(self, plan: StepPlan, result: StepResult) -> None:
        """Learns from a step, after ``commit``."""
        seconds = result.seconds + result.host_seconds
        if plan.is_decode_only:
            self._decoding = seconds / max(1, len(result.rounds))
            return
        num_tokens = sum(part.num_tokens for part in plan.scheduled if part.kind is not Kind.DECODE)
        decoding = self._decoding if len(plan.prompts) < len(plan.scheduled) else 0.0
        allowed = max(self.seconds, decoding)
        taken = max(seconds - decoding, 1e-6)
        if taken > allowed:
            fewer = int(num_tokens * max(allowed / taken, 0.25))
            self._most = max(FEWEST_TOKENS, min(self._most, fewer) // 16 * 16)
        elif num_tokens >= self._most and taken < allowed / 2:
            self._most *= 2
