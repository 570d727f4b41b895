"""Heads are trained for what they do at inference, and a stopped run goes on as if it had not been."""

import json
import re
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from tests.heads import NaiveHead, Shape
from tests.models import make_engine, run_engine
from truedraft.engine.commands import train_draft
from truedraft.engine.commands.train_draft import TrainSettings
from truedraft.engine.config import BUNDLED_PAIR
from truedraft.engine.errors import ModelLoadError
from truedraft.engine.layers.decoder import DecoderWeights
from truedraft.engine.layers.linear import DenseEmbeddings, TorchLinear
from truedraft.engine.layers.norm import Norm
from truedraft.engine.messages import SamplingParams
from truedraft.engine.models.heads.eagle_config import read_eagle_config
from truedraft.engine.models.heads.vocabulary import most_frequent
from truedraft.engine.models.prompt_file import read_prompts
from truedraft.engine.training import eagle_module
from truedraft.engine.training.eagle_head import save_head
from truedraft.engine.training.eagle_module import EagleModule, HeadShape
from truedraft.engine.training.texts import Text, Writer
from truedraft.engine.training.trainer import Measured, Schedule, Trainer

SHAPE = HeadShape(
    hidden_size=32,
    intermediate_size=64,
    num_heads=4,
    num_kv_heads=2,
    head_dim=8,
    taps=3,
    num_drafted=12,
    rope_theta=10_000.0,
    eps=1e-5,
)


def random_module(seed: int = 0) -> EagleModule:
    torch.manual_seed(seed)
    module = EagleModule(SHAPE)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.add_(0.3 * torch.randn_like(parameter))
    return module


def naive_of(module: EagleModule, folder: Path, embeddings: torch.Tensor) -> NaiveHead:
    """Reads the saved head by its definition."""
    config = type("Config", (), {"vocab_size": 12, "max_position_embeddings": 64, "architectures": ["Llama"]})
    save_head(folder, module, None, (2, 3, 4), "target", config, torch.float32)
    saved = json.loads((folder / "config.json").read_text())
    names = ("norm_before_residual", "norm_before_fc", "fc_norm", "norm_output")
    options = {name: saved[name] for name in names}
    shape = Shape(32, 12, inputs=(0, 1, 2), has_parts=True, **options)
    return NaiveHead(shape, load_file(folder / "model.safetensors"), embeddings)


def steps_are_those_of_inference(tmp_path: Path) -> None:
    """The logits of all steps at all places are what a head drafts by when it is fed these tokens."""
    module, embeddings = random_module(), torch.randn(12, 32)
    naive = naive_of(module, tmp_path / "head", embeddings)
    ids, hidden = torch.randint(0, 12, (1, 9)), torch.randn(1, 5, 3, 32)
    with torch.no_grad():
        found = module(hidden, [embeddings[ids[:, 1 + step : 6 + step]] for step in range(4)])
    for place in range(5):
        features = naive._features(hidden[0, : place + 1])
        for step in range(4):
            logits, output = naive._step(ids[0, 1 : place + 2 + step].tolist(), features)
            torch.testing.assert_close(found[step][0, place], logits, atol=1e-4, rtol=1e-4)
            features = torch.cat((features, output[None]))


def test_steps_are_those_of_inference(tmp_path: Path) -> None:
    steps_are_those_of_inference(tmp_path)


def test_tensors_have_the_names_that_vllm_loads(tmp_path: Path) -> None:
    config = type("Config", (), {"vocab_size": 20, "max_position_embeddings": 64, "architectures": ["Llama"]})
    ids = torch.arange(12) + 3
    save_head(tmp_path / "head", random_module(), ids, (2, 3, 4), "target", config, torch.float16)
    tensors = load_file(tmp_path / "head" / "model.safetensors")
    layer = {f"self_attn.{name}_proj" for name in "qkvo"} | {
        f"mlp.{name}_proj" for name in ("gate", "up", "down")
    }
    layer |= {"input_layernorm", "hidden_norm", "post_attention_layernorm"}
    names = {"fc", "norm", "lm_head", *(f"fc_norm.{number}" for number in range(3))}
    names |= {f"layers.0.{name}" for name in layer}
    assert tensors.keys() == {f"{name}.weight" for name in names} | {"d2t", "t2d"}
    assert tensors["d2t"].tolist() == [3] * 12
    assert tensors["t2d"].nonzero()[:, 0].tolist() == ids.tolist()
    read = read_eagle_config(str(tmp_path / "head"))
    assert read is not None
    assert (read.taps(6), read.draft_vocab_size, read.norm_output) == ((1, 2, 3), 12, True)


def no_later_step_sees_its_own_place(patch: pytest.MonkeyPatch) -> None:
    """Later steps see what the first one sees, and nothing of themselves."""
    honest = EagleModule._attend

    def attend(
        self: EagleModule, x: torch.Tensor, step: int, keys: list[torch.Tensor], values: list[torch.Tensor]
    ) -> torch.Tensor:
        return honest(self, x, step, keys[:1], values[:1])

    patch.setattr(EagleModule, "_attend", attend)


def positions_stay(patch: pytest.MonkeyPatch) -> None:
    """Later steps stand where the first one stands."""
    honest = eagle_module._turn
    patch.setattr(eagle_module, "_turn", lambda x, step, theta: honest(x, 0, theta))


@pytest.mark.parametrize("plant", [no_later_step_sees_its_own_place, positions_stay])
def test_wrong_steps_are_caught(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, plant: Callable[[pytest.MonkeyPatch], None]
) -> None:
    plant(monkeypatch)
    with pytest.raises(AssertionError):
        steps_are_those_of_inference(tmp_path)


def settings_for(folder: Path, **changed: Any) -> TrainSettings:
    prompts = folder / "prompts.jsonl"
    lines: list[dict[str, Any]] = [{"prompt": f"Once upon a time number {number}"} for number in range(11)]
    lines.append({"messages": [{"role": "user", "content": "Tell me a story."}]})
    prompts.write_text("\n".join(map(json.dumps, lines)))
    given = {
        "tokens": 300,
        "text_tokens": 24,
        "steps": 2,
        "max_num_sequences": 8,
        "draft_vocab_size": 512,
        "num_threads": 1,
    }
    return TrainSettings(**given | {"prompts": prompts, "out": folder / "head"} | changed, _cli_parse_args=[])


def test_a_stopped_run_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its head is the one of a run that was not stopped, to the bit, and drafts for the target."""
    monkeypatch.setattr(train_draft, "SAVE_SECONDS", 0.0)
    whole, stopped = (tmp_path / name for name in ("whole", "stopped"))
    for folder in (whole, stopped):
        folder.mkdir()
    train_draft.train(settings_for(whole))
    learn = Trainer.learn

    def stop(self: Trainer, texts: list[Text]) -> Measured:
        if self.num_tokens > 100:
            raise KeyboardInterrupt
        return learn(self, texts)

    with monkeypatch.context() as patch:
        patch.setattr(Trainer, "learn", stop)
        with pytest.raises(KeyboardInterrupt):
            train_draft.train(settings_for(stopped))
    with pytest.raises(ModelLoadError, match="other settings \\(steps\\)"):
        train_draft.train(settings_for(stopped, steps=3))
    train_draft.train(settings_for(stopped))
    first, second = (load_file(folder / "head" / "model.safetensors") for folder in (whole, stopped))
    assert first.keys() == second.keys()
    assert all(torch.equal(first[name], second[name]) for name in first)
    assert {tensor.dtype for tensor in first.values()} == {torch.float16, torch.int64, torch.bool}
    assert not (stopped / "head" / "training.pt").exists()
    core = make_engine(str(BUNDLED_PAIR / "target"), str(whole / "head"), method="eagle", dtype="auto")
    run_engine(core, [[5, 6, 7]], SamplingParams(max_tokens=12, temperature=0))
    assert core.stats.drafts["eagle"].num_draft_tokens > 0


def test_learning_lowers_the_loss_and_says_what_is_accepted() -> None:
    """Texts of one law that a head can know: the acceptance that is reported is one less total variation."""
    embeddings = torch.nn.functional.normalize(
        torch.randn(12, 32, generator=torch.Generator().manual_seed(1))
    )
    weights = DecoderWeights(
        DenseEmbeddings(embeddings),
        [],
        Norm(torch.ones(32), 1e-5),
        TorchLinear(8 * embeddings, None),
        None,
        1.0,
        None,  # type: ignore[arg-type]
    )
    ids = torch.arange(40) * 5 % 12
    states = embeddings[ids[1:], None].repeat(1, 4, 1)  # each place knows what follows it
    texts = [Text(ids.tolist(), states)] * 4
    schedule = Schedule(8000, 2, 1e-2, 4)
    trainer = Trainer(random_module(), weights.embeddings, weights, None, schedule, torch.device("cpu"))
    before = trainer.measure(texts)
    while trainer.num_tokens < 8000:
        trainer.learn(texts)
    after = trainer.measure(texts)
    assert after.loss < before.loss
    assert min(after.acceptance) > 0.9 > max(before.acceptance)
    assert 2.7 < after.tokens_per_round <= 3


def test_vocabularies_are_ranked() -> None:
    counts = Counter({7: 5, 3: 4, 9: 1})
    assert most_frequent(counts, 4, 12, [11, 99]).tolist() == [3, 7, 9, 11]
    assert most_frequent(counts, 6, 12, []).tolist() == [0, 1, 2, 3, 7, 9]


@pytest.mark.parametrize(
    ("text", "words"),
    [("", "has no prompts"), ('{"prompt": 3}', "line 1"), ("no", "is no JSON")],
)
def test_prompts_that_cannot_be_read_are_refused(tmp_path: Path, text: str, words: str) -> None:
    path = tmp_path / "prompts.jsonl"
    path.write_text(text)
    with pytest.raises(ModelLoadError, match=words):
        read_prompts(path)


def test_progress_is_said_from_the_start_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(train_draft, "SHOW_SECONDS", 0.0)
    train_draft.train(settings_for(tmp_path))
    lines = capsys.readouterr().out.splitlines()
    assert "texts that are held back" in lines[0]
    assert "to count which it uses" in lines[1]
    assert any(re.fullmatch(r"[\d,]+ of [\d,]+ tokens, about [\d.]+ (s|min|h) to go", line) for line in lines)


def test_texts_to_learn_from_are_not_those_that_are_held_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """With one prompt its texts are others, and so they are said to be; of a prompt that comes twice neither
    is learned from where one is held back."""
    written: list[tuple[list[list[int]], list[list[int]]]] = []

    def write(self: Writer, first: int, count: int) -> list[Text]:
        texts = original(self, first, count)
        written.append((self.prompts, [text.token_ids for text in texts]))
        return texts

    original = Writer.write
    monkeypatch.setattr(Writer, "write", write)
    for prompts, is_said in (("One day\n", True), ("One day\nA fox\nOne day\n", False)):
        written.clear()
        folder = tmp_path / str(is_said)
        folder.mkdir()
        (folder / "prompts.txt").write_text(prompts)
        settings = settings_for(folder, prompts=folder / "prompts.txt")
        train_draft.train(settings)
        (held, texts), *learned = written
        assert (held[0] in learned[0][0]) == is_said
        assert all(text not in more for _, more in learned for text in texts)
        assert ("has no prompt to hold back" in capsys.readouterr().out) == is_said


@pytest.mark.parametrize(
    ("name", "content", "words"),
    [
        ("nothing.txt", None, "nothing.txt cannot be read: no such file or directory"),
        (".", None, "cannot be read: is a directory"),
        ("bytes.txt", b"\xff\xfe\x00", "bytes.txt is no text in UTF-8"),
        ("empty.txt", b"\n", "has no prompts"),
    ],
)
def test_a_file_that_has_no_prompts_is_named(
    name: str, content: bytes | None, words: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    if content is not None:
        (tmp_path / name).write_bytes(content)
    settings = settings_for(tmp_path, prompts=tmp_path / name)
    assert train_draft.main(settings) == train_draft.FAILED
    assert words in capsys.readouterr().err
