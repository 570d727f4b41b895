"""An MTP head is trained for what it does at inference, and saved as its checkpoint has it."""

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from msgspec import structs
from safetensors.torch import load_file, save_file

from tests.engine.head_runs import TRAINED, compare_with_definition, mtp_engine, story_prompts
from tests.engine.test_mtp import GREEDY, OTHERS, save_other
from tests.engine.test_training import settings_for
from tests.models import make_engine, run_engine
from tests.mtp import add_to_checkpoint
from truedraft.engine.build import drafting_method
from truedraft.engine.commands import train_draft
from truedraft.engine.errors import ModelLoadError
from truedraft.engine.models.load import load_model
from truedraft.engine.models.options import LoadOptions
from truedraft.engine.training import mtp_module
from truedraft.engine.training.mtp_head import MtpHead
from truedraft.engine.training.texts import Text
from truedraft.engine.training.trainer import Measured, Trainer

PLACES, STEPS = 5, 3


def head_of(path: str, target: str) -> MtpHead:
    return MtpHead(path, load_model(target, LoadOptions()), LoadOptions(), torch.float32)  # type: ignore[arg-type]


def steps_are_those_of_inference(folder: Path, name: str) -> None:
    """The logits of all steps at all places are what a head drafts by when it is fed these tokens."""
    target, naive = save_other(folder / "target", OTHERS[name])
    model = naive.target[0]
    ids, hidden = torch.randint(0, 48, (1, PLACES + STEPS + 1)), torch.randn(1, PLACES, 1, 32)
    embedded = [model.model.embed_tokens(ids[:, 1 + step : 1 + step + PLACES]) for step in range(STEPS)]
    with torch.no_grad():
        found = head_of(target, target).module(None)(hidden, embedded)
        for place in range(PLACES):
            states = hidden[0, : place + 1, 0]
            for step in range(STEPS):
                output = naive.norm(naive.hidden(ids[0, 1 : place + 2 + step].tolist(), states))[-1:]
                expected = model.lm_head(output)[0]
                torch.testing.assert_close(found[step][0, place], expected, atol=1e-3, rtol=1e-3)
                states = torch.cat((states, output))


@pytest.mark.parametrize("name", OTHERS)
def test_steps_are_those_of_inference(tmp_path: Path, name: str) -> None:
    steps_are_those_of_inference(tmp_path, name)


def no_later_step_sees_its_own_place(patch: pytest.MonkeyPatch) -> None:
    """Later steps see what the first one sees, and the place before theirs."""
    honest = torch.cat

    def cat(parts: list[torch.Tensor], dim: int = 0) -> torch.Tensor:
        turned = parts[0].dtype == torch.bool and len(parts) > 1
        return honest([parts[0], *(part.roll(1, 1) for part in parts[1:])] if turned else parts, dim=dim)

    patch.setattr(mtp_module.torch, "cat", cat)


def positions_stay(patch: pytest.MonkeyPatch) -> None:
    """Later steps stand where the first one stands."""
    honest = mtp_module.MtpModule._angles
    patch.setattr(mtp_module.MtpModule, "_angles", lambda self, x, step: honest(self, x, 0))


@pytest.mark.parametrize("plant", [no_later_step_sees_its_own_place, positions_stay])
def test_wrong_steps_are_caught(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, plant: Callable[[pytest.MonkeyPatch], None]
) -> None:
    plant(monkeypatch)
    with pytest.raises(AssertionError):
        steps_are_those_of_inference(tmp_path, "GLM-4.5")


@pytest.mark.parametrize("name", ["Qwen3-Next", "GLM-4.5"])
def test_it_is_saved_as_the_checkpoint_has_it(tmp_path: Path, name: str) -> None:
    """What is not trained is equal to the bit, under names that can be merged, and drafts as before."""
    target, naive = save_other(tmp_path / "target", OTHERS[name])
    if is_glm := name == "GLM-4.5":
        rows = naive.target[0].lm_head.weight.data.flip(0)
        naive.target[0].lm_head.weight.data = rows
        add_to_checkpoint(target, {"model.layers.2.shared_head.head.weight": rows})
    head, folder = head_of(target, target), tmp_path / "head"
    head.save(folder, head.module(None), None)
    stored, saved = (load_file(path / "model.safetensors") for path in (Path(target), folder))
    prefix = OTHERS[name].prefix
    assert saved.keys() == {each for each in stored if each.startswith(prefix)}
    assert all(torch.equal(saved[each], stored[each]) for each in saved)
    assert any(each.endswith("shared_head.head.weight") for each in saved) == is_glm
    assert drafting_method(str(folder)) == "mtp"
    assert drafting_method(target) == "draft_model"
    params = structs.replace(GREEDY, max_tokens=8)
    plain = make_engine(target, None, max_model_len=64)
    core = mtp_engine(target, str(folder))
    if not is_glm:  # the definition has a single output layer
        compare_with_definition(naive, core, [[1, 2, 3, 4, 5]], params)
    alone = structs.replace(params, method="none")
    assert run_engine(core, [[7, 5]], params) == run_engine(plain, [[7, 5]], alone)
    again = head_of(str(folder), target)
    again.save(tmp_path / "again", again.module(None), None)
    second = load_file(tmp_path / "again" / "model.safetensors")
    assert second.keys() == saved.keys()
    assert all(torch.equal(second[each], saved[each]) for each in saved)


def test_training_brings_a_perturbed_head_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A run that was stopped goes on, and what it saves is accepted more often, for the same text."""
    target = tmp_path / "target"
    shutil.copytree(TRAINED, target)
    stored, generator = load_file(target / "model.safetensors"), torch.Generator().manual_seed(1)
    for name, tensor in stored.items():
        if name.startswith("mtp."):
            noise = torch.randn(tensor.shape, generator=generator)
            stored[name] = (tensor + 0.7 * tensor.float().std() * noise).to(tensor.dtype)
    save_file(stored, target / "model.safetensors", metadata={"format": "pt"})
    changed = {"target": str(target), "head": "mtp", "draft_vocab_size": "auto", "tokens": 900}
    settings = settings_for(tmp_path, **changed, text_tokens=48, learning_rate=2e-3)
    found: list[Measured] = []
    measure = Trainer.measure

    def measured(self: Trainer, texts: list[Text]) -> Measured:
        found.append(measure(self, texts))
        if len(found) == 3:
            raise KeyboardInterrupt
        return found[-1]

    monkeypatch.setattr(train_draft, "SAVE_SECONDS", 0.0)
    monkeypatch.setattr(Trainer, "measure", measured)
    with pytest.raises(KeyboardInterrupt):
        train_draft.train(settings)
    after, before = train_draft.train(settings), found[0]
    assert all(late > early + 0.02 for early, late in zip(before.acceptance, after.acceptance, strict=True))
    saved = load_file(tmp_path / "head" / "model.safetensors")
    assert all(tensor.dtype == stored[name].dtype for name, tensor in saved.items())
    core, plain = mtp_engine(str(target), str(tmp_path / "head")), make_engine(str(target), None)
    texts = run_engine(core, story_prompts(), GREEDY)
    assert texts == run_engine(plain, story_prompts(), structs.replace(GREEDY, method="none"))
    assert core.stats.num_accepted_tokens > 0.1 * core.stats.num_draft_tokens


def test_what_is_no_mtp_head_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ModelLoadError, match="self:int4 is no MTP head"):
        train_draft.train(settings_for(tmp_path, head="self:int4"))
    with pytest.raises(ValueError, match="--head mtp names the head"):
        settings_for(tmp_path, draft="mtp")
    at_home = settings_for(tmp_path, head="~/head", out="~/out")
    assert (at_home.head, at_home.out) == (str(Path.home() / "head"), Path.home() / "out")


def test_no_model_is_written_over(tmp_path: Path) -> None:
    """A head may be, but not the one that training begins with."""
    target, naive = save_other(tmp_path / "target", OTHERS["GLM-4.5"])
    with pytest.raises(ModelLoadError, match="target has a model, which would be written over"):
        train_draft.train(settings_for(tmp_path, target=target, out=target))
    folder = tmp_path / "head"
    folder.mkdir()
    prefix, tensors = OTHERS["GLM-4.5"].prefix, naive.named_tensors(OTHERS["GLM-4.5"].layout)
    save_file({prefix + name: tensor for name, tensor in tensors.items()}, folder / "model.safetensors")
    with pytest.raises(ModelLoadError, match="head has a model, which would be written over"):
        train_draft.train(settings_for(tmp_path, target=target, head=str(folder), out=folder))
