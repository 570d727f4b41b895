"""Gates: what must hold of an exact engine, as functions that raise ``AssertionError``.

The tests call them on the engine as it is; ``test_mutants`` calls them on engines with a planted bug and
expects them to raise.
"""

from collections.abc import Callable
from typing import Any

import msgspec
import numpy as np
import torch

from tests import naive
from tests.engine.conftest import Models
from tests.engine.planners import FixedPlanner, lookups, use_planner
from tests.engine.simulation import UP_TO_TWO, Lengths, chi_square, p_value
from tests.models import make_engine, outputs_by_choice, run_engine
from truedraft.engine.core.engine import EngineCore
from truedraft.engine.messages import Generate, SamplingParams
from truedraft.engine.models.hf.fresh import FreshModel
from truedraft.engine.models.options import LoadOptions
from truedraft.engine.rows.columns import Rule
from truedraft.engine.sampling.verify import Verdict

SIGNIFICANCE = 1e-5
PROMPTS = [[1, 2, 3], [4], [5, 6, 7, 8, 9, 10, 11], list(range(16)) * 2, [2, 2]]
PENALTIES = SamplingParams(
    max_tokens=40, temperature=0, presence_penalty=0.5, frequency_penalty=0.7, repetition_penalty=1.4
)


def joint_distribution(
    params: SamplingParams,
    rule: Rule,
    num_samples: int = 4000,
    in_flight: int = 0,
    drafts_greedily: bool | None = None,
    lengths: Lengths = UP_TO_TWO,
) -> None:
    """Three tokens' joint histogram is the exactly enumerated one."""
    assert p_value(params, rule, num_samples, in_flight, drafts_greedily, lengths) > SIGNIFICANCE


def greedy_identity(models: Models, params: SamplingParams) -> None:
    """Greedy text with speculation is the text without, for several draft lengths side by side."""
    plain = run_engine(make_engine(models.target, None), PROMPTS, params)
    for k in (1, 4, 8):
        core = make_engine(models.target, models.close_draft, num_speculative_tokens=k)
        assert run_engine(core, PROMPTS, params) == plain


def self_draft_is_always_accepted(models: Models) -> None:
    core = make_engine(models.target, models.target, method="draft_model", num_speculative_tokens=5)
    run_engine(core, PROMPTS, SamplingParams(max_tokens=40, temperature=0))
    assert core.stats.num_accepted_tokens == core.stats.num_draft_tokens > 0


def ends_at_the_first_stop(models: Models) -> None:
    """Stop ids inside accepted runs: the text of plain decoding, and not a token more."""
    for stop in range(16):
        params = SamplingParams(max_tokens=40, temperature=0, stop_token_ids=[stop])
        greedy_identity_of_one_draft(models, params)


def greedy_identity_of_one_draft(models: Models, params: SamplingParams) -> None:
    plain = run_engine(make_engine(models.target, None), PROMPTS, params)
    drafted = run_engine(make_engine(models.target, models.target, num_speculative_tokens=6), PROMPTS, params)
    assert drafted == plain


def seeded_identity(models: Models) -> None:
    """Coupled sampling says the same with a draft and without one."""
    params = [SamplingParams(max_tokens=30, seed=i) for i in range(len(PROMPTS))]
    plain = run_engine(make_engine(models.target, None), PROMPTS, params)
    assert run_engine(make_engine(models.target, models.close_draft), PROMPTS, params) == plain


def rotating_engine(target: str, draft: str | None, **config: Any) -> EngineCore:
    """Every source drafts, in every row and batch: another one in each round."""
    core = make_engine(target, draft, method="auto", ngram_min_match=1, **config)
    use_planner(core, FixedPlanner(lookups(ngram_min_match=1), rotates=True))
    return core


def mixed_sources_distribution(models: Models, num_requests: int = 40) -> None:
    """Prediction, n-grams and draft model by turns, within the same rows: three tokens' joint histogram."""
    prompt = [1, 2, 3, 1, 2]
    most_likely = SamplingParams(max_tokens=8, temperature=0)
    prediction = run_engine(make_engine(models.target, None), [prompt], most_likely)[0]
    params = SamplingParams(max_tokens=5, temperature=1.3, top_k=3, verification="rejection")
    core = rotating_engine(models.target, models.close_draft, num_speculative_tokens=2, max_num_sequences=128)
    for number in range(num_requests):
        each = msgspec.structs.replace(params, seed=number)
        core.add(Generate(str(number), prompt, each, n=100, prediction_token_ids=prediction))
    counts = np.zeros([16] * 3)
    for tokens in outputs_by_choice(core).values():
        counts[tuple(tokens[:3])] += 1
    assert set(core.stats.drafts) == {"draft_model", "ngram", "prediction"}
    target = FreshModel(models.target, LoadOptions())
    rows: dict[tuple[int, ...], Any] = {}

    def logits(token_ids: list[int]) -> Any:
        key = tuple(token_ids)
        if key not in rows:
            rows[key] = target.logits(token_ids, 16)[-1].double().numpy()
        return rows[key]

    expected = naive.joint(logits, params, prompt, 3, 16)
    assert chi_square(counts.ravel(), expected.ravel()) > SIGNIFICANCE


def self_draft_survives_other_sources(models: Models) -> None:
    """A draft that is the target itself is always right, whatever was drafted by others in between."""
    core = rotating_engine(models.target, models.target, num_speculative_tokens=5)
    params = SamplingParams(max_tokens=40, temperature=0)
    for number, prompt in enumerate(PROMPTS):
        core.add(Generate(str(number), prompt, params, prediction_token_ids=list(range(16))))
    outputs_by_choice(core)
    assert set(core.stats.drafts) == {"draft_model", "ngram", "prediction"}
    counts = core.stats.drafts["draft_model"]
    assert counts.num_accepted_tokens == counts.num_draft_tokens > 0


def leaves_its_inputs_alone(verify: Callable[..., Verdict]) -> None:
    generator = torch.Generator().manual_seed(1)
    arguments = [
        torch.rand(4, 3, 5, generator=generator).softmax(-1),
        torch.randint(5, (4, 2), generator=generator),
        torch.rand(4, 2, 5, generator=generator).softmax(-1),
        torch.tensor([0, 1, 2, 2]),
        torch.rand(4, 2, generator=generator, dtype=torch.float64),
        torch.rand(4, 3, generator=generator, dtype=torch.float64),
    ]
    copies = [argument.clone() for argument in arguments]
    first, second = verify(*arguments), verify(*arguments)
    assert all(torch.equal(a, b) for a, b in zip(arguments, copies, strict=True))
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))
