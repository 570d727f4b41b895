"""Names of models, against a hub on the loopback interface: what is fetched, and what people are told."""

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from huggingface_hub import constants

from tests.hub import Hub, Repository, hub_of
from truedraft import LLM, SamplingParams
from truedraft.engine.config import BUNDLED_PAIR, EngineConfig
from truedraft.engine.errors import ModelLoadError
from truedraft.engine.hub.fetch import Progress, find_model
from truedraft.engine.hub.located import located
from truedraft.engine.hub.names import HubName, hub_name
from truedraft.engine.hub.repository import RepoFile, checkpoint_files, choose, drafters, variants
from truedraft.engine.hub.siblings import siblings
from truedraft.engine.hub.store import remove, stored_models
from truedraft.server.cli.main import main

ROOT = Path(__file__).parents[1]
DEMO = {path.name: path.read_bytes() for path in sorted((BUNDLED_PAIR / "target").iterdir())}
DRAFT = {path.name: path.read_bytes() for path in sorted((BUNDLED_PAIR / "draft").iterdir())}
LARGE = bytes(range(256)) * 4096 * 24  # 24 MiB, as huggingface_hub writes 10 MiB at a time


def quantised(*labels: str, **more: bytes) -> dict[str, bytes]:
    return {
        f"Tiny-{label}.gguf": label.encode() * 100 * (number + 1) for number, label in enumerate(labels)
    } | more


REPOSITORIES = {
    "owner/Tiny-GGUF": {**quantised("Q2_K", "Q4_K_M", "Q8_0"), "mmproj-F16.gguf": b"p", "README.md": b"r"},
    "owner/Few-GGUF": quantised("Q2_K", "Q5_K_M", "Q8_0"),
    "owner/Split-GGUF": {
        "Q4_K_M/Big-Q4_K_M-00002-of-00002.gguf": b"second",
        "Q4_K_M/Big-Q4_K_M-00001-of-00002.gguf": b"first!",
        "Q8_0/Big-Q8_0-00001-of-00001.gguf": b"other",
    },
    "owner/Folders-GGUF": {
        "UD-Q4_K_XL/Big-UD-Q4_K_XL-00001-of-00002.gguf": b"first",
        "UD-Q4_K_XL/Big-UD-Q4_K_XL-00002-of-00002.gguf": b"second",
        "Q4_K_M/Big-Q4_K_M.gguf": b"one",
        "mmproj/Big-F16.gguf": b"p",
        "onnx/model.safetensors": b"o",
    },
    # Was split twice; of the second series a part is missing.
    "owner/Again-GGUF": {
        f"Big-Q8_0-0000{number}-of-0000{count}.gguf": b"%d of %d" % (number, count)
        for number, count in ((1, 2), (2, 2), (1, 3), (3, 3))
    },
    "owner/Names-GGUF": {"Tiny.imatrix-Q4_K_M.gguf": b"m", "imatrix_tiny.gguf": b"i", "tiny-fp16.gguf": b"f"},
    "owner/eyes-GGUF": {"Tiny-mmproj-F16.gguf": b"p"},
    "owner/Tiny-DFlash-GGUF": {"Tiny-DFlash-Q8_0.gguf": b"d", "Tiny-DFlash-F16.gguf": b"dd"},
    "owner/Two-GGUF": {"a-Q4_K_M.gguf": b"1", "b-Q4_K_M.gguf": b"2"},
    "owner/Heads-GGUF": {**quantised("Q4_K_M"), "mtp-Tiny-Q8_0.gguf": b"m", "eagle3-Tiny-F16.gguf": b"e"},
    "owner/demo": {
        **DEMO,
        "original/weights.safetensors": b"x",
        "README.md": b"r",
        "consolidated.safetensors": b"c",
    },
    "owner/draft": DRAFT,
    "owner/mixed": {**DEMO, **quantised("Q8_0")},
    "owner/large": {"Large-Q4_K_M.gguf": LARGE},
    "owner/parts": {f"Large-Q4_K_M-0000{number}-of-00002.gguf": LARGE for number in (1, 2)},
    "owner/empty": {},
    "owner/text": {"README.md": b"r", "notes.txt": b"n"},
    "lonely": DEMO,
}


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Hub]:
    repositories = {name: Repository(files, tags=("v1",)) for name, files in REPOSITORIES.items()}
    repositories["owner/gated"] = Repository(DEMO, is_gated=True)
    with hub_of(repositories) as hub:
        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
        monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
        point_to(hub.url, monkeypatch)
        yield hub


def point_to(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(constants, "ENDPOINT", url)
    template = url + "/{repo_id}/resolve/{revision}/{filename}"
    monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)
    monkeypatch.setenv("HF_ENDPOINT", url)


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("owner/repo", HubName("owner/repo")),
        ("repo", HubName("repo")),
        ("owner/repo:q4_k_m", HubName("owner/repo", quant="q4_k_m")),
        ("owner/repo:UD-Q4_K_XL", HubName("owner/repo", quant="UD-Q4_K_XL")),
        ("owner/repo@v1", HubName("owner/repo", "v1")),
        ("owner/repo@refs/pr/1:Q8_0", HubName("owner/repo", "refs/pr/1", quant="Q8_0")),
        ("owner/repo/model.gguf", HubName("owner/repo", file="model.gguf")),
        (
            "owner/repo/Q8/model-00001-of-00002.GGUF",
            HubName("owner/repo", file="Q8/model-00001-of-00002.GGUF"),
        ),
        ("owner/repo@v1/model.gguf", HubName("owner/repo", "v1", "model.gguf")),
        ("hf.co/owner/repo", HubName("owner/repo")),
        ("hf.co/owner/repo:Q8_0", HubName("owner/repo", quant="Q8_0")),
        ("huggingface.co/owner/repo/model.gguf", HubName("owner/repo", file="model.gguf")),
        ("https://huggingface.co/owner/repo", HubName("owner/repo")),
        ("https://huggingface.co/owner/repo/", HubName("owner/repo")),
        ("https://hf.co/owner/repo/tree/main", HubName("owner/repo", "main")),
        (
            "https://huggingface.co/owner/repo/tree/main/UD-Q4_K_XL",
            HubName("owner/repo", "main", folder="UD-Q4_K_XL"),
        ),
        ("https://huggingface.co/owner/repo/tree/main/a/b/", HubName("owner/repo", "main", folder="a/b")),
        ("https://huggingface.co/owner/repo/blob/main/model.safetensors", HubName("owner/repo", "main")),
        ("https://huggingface.co/owner/repo/blob/main/a/x.json", HubName("owner/repo", "main", folder="a")),
        ("https://huggingface.co/owner/repo/blob/v1/a/m.gguf", HubName("owner/repo", "v1", "a/m.gguf")),
        (
            "https://huggingface.co/owner/repo/resolve/main/m.gguf?download=true",
            HubName("owner/repo", "main", "m.gguf"),
        ),
        (
            "https://huggingface.co/owner/repo/blob/refs%2Fpr%2F1/m.gguf",
            HubName("owner/repo", "refs/pr/1", "m.gguf"),
        ),
        ("https://huggingface.co/owner/repo/tree/refs/pr/1", HubName("owner/repo", "refs/pr/1")),
        ("https://huggingface.co/owner/repo/tree/feature%2Fx", HubName("owner/repo", "feature/x")),
        ("https://huggingface.co/owner/repo/commit/0a1b2c", HubName("owner/repo", "0a1b2c")),
        ("https://huggingface.co/owner/repo/tree/main:q8_0", HubName("owner/repo", "main", quant="q8_0")),
        ("https://huggingface.co/old/tree/main", HubName("old", "main")),
        ("https://huggingface.co/old/resolve/main/m.gguf", HubName("old", "main", "m.gguf")),
        (
            "https://huggingface.co/owner/repo?show_file_info=a%2Fm.gguf",
            HubName("owner/repo", file="a/m.gguf"),
        ),
        (
            "https://huggingface.co/owner/repo/tree/main?show_file_info=m.gguf#top",
            HubName("owner/repo", "main", "m.gguf"),
        ),
        ("https://huggingface.co/owner/repo?local-app=vllm", HubName("owner/repo")),
        ("HTTPS://HuggingFace.CO/Owner/Repo/", HubName("Owner/Repo")),
        ("HF.co/owner/repo:q4_K_m?download=true", HubName("owner/repo", quant="q4_K_m")),
        ("huggingface.co/owner/repo/resolve/main/m.gguf", HubName("owner/repo", "main", "m.gguf")),
        ("hf://owner/repo", HubName("owner/repo")),
        ("hf://owner/repo@v1/a/m.gguf", HubName("owner/repo", "v1", "a/m.gguf")),
        ("owner/repo/", HubName("owner/repo")),
        ("owner/repo:Q8_0/", HubName("owner/repo", quant="Q8_0")),
        ("owner/repo:Model-Q8_0.gguf", HubName("owner/repo", quant="Model-Q8_0.gguf")),
        ("owner/repo@refs/pr/1/m.gguf", HubName("owner/repo", "refs/pr/1", "m.gguf")),
        ("owner/repo:Q8_0@v1", None),
        ("owner/repo/m.gguf:Q8_0", None),
        ("https://huggingface.co/owner/repo/blob/main/m.gguf:Q8_0", None),
        ("https://huggingface.co/datasets/owner/name", None),
        ("https://huggingface.co/owner/repo/discussions/1", None),
        ("./owner/repo", None),
        ("../repo", None),
        ("/owner/repo", None),
        ("~/repo", None),
        ("model.gguf", None),
        ("models/model.gguf", None),
        ("a/b/c", None),
        ("two words", None),
        ("https://example.com/owner/repo", None),
        ("engine/demo_pair", None),  # it exists
    ],
)
def test_names_are_read_in_all_their_forms(name: str, expected: HubName | None) -> None:
    assert hub_name(name) == expected


def test_a_mirrors_address_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_ENDPOINT", "https://mirror.example")
    assert hub_name("https://mirror.example/owner/repo/tree/main") == HubName("owner/repo", "main")


@pytest.mark.parametrize(
    ("name", "files"),
    [
        ("owner/Tiny-GGUF", ["Tiny-Q4_K_M.gguf"]),
        ("owner/Tiny-GGUF:q8_0", ["Tiny-Q8_0.gguf"]),
        ("hf.co/owner/Tiny-GGUF:Q2_K", ["Tiny-Q2_K.gguf"]),
        ("owner/Tiny-GGUF/Tiny-Q2_K.gguf", ["Tiny-Q2_K.gguf"]),
        ("owner/Tiny-GGUF@v1", ["Tiny-Q4_K_M.gguf"]),
        ("owner/Few-GGUF", ["Tiny-Q8_0.gguf"]),
        (
            "owner/Split-GGUF",
            ["Q4_K_M/Big-Q4_K_M-00001-of-00002.gguf", "Q4_K_M/Big-Q4_K_M-00002-of-00002.gguf"],
        ),
        ("owner/Split-GGUF/Q4_K_M/Big-Q4_K_M-00002-of-00002.gguf", ["Q4_K_M/Big-Q4_K_M-00001-of-00002.gguf"]),
        ("owner/mixed:Q8_0", ["Tiny-Q8_0.gguf"]),
        ("owner/Tiny-GGUF@v1:q2_k", ["Tiny-Q2_K.gguf"]),
        ("HF.co/owner/Tiny-GGUF:Tiny-q2_k.gguf/", ["Tiny-Q2_K.gguf"]),
        ("owner/Two-GGUF:b-Q4_K_M", ["b-Q4_K_M.gguf"]),
        ("https://hf.co/owner/Tiny-GGUF?show_file_info=Tiny-Q8_0.gguf", ["Tiny-Q8_0.gguf"]),
        (
            "https://huggingface.co/owner/Folders-GGUF/tree/main/UD-Q4_K_XL",
            [f"UD-Q4_K_XL/Big-UD-Q4_K_XL-0000{number}-of-00002.gguf" for number in (1, 2)],
        ),
        ("owner/Folders-GGUF", ["Q4_K_M/Big-Q4_K_M.gguf"]),
        (
            "owner/Again-GGUF/Big-Q8_0-00002-of-00002.gguf",
            [f"Big-Q8_0-0000{n}-of-00002.gguf" for n in (1, 2)],
        ),
        ("owner/Names-GGUF", ["Tiny.imatrix-Q4_K_M.gguf"]),
        ("owner/Names-GGUF:FP16", ["tiny-fp16.gguf"]),
        ("owner/Tiny-DFlash-GGUF:q8_0", ["Tiny-DFlash-Q8_0.gguf"]),
    ],
)
def test_the_files_that_a_name_asks_for_are_fetched(hub: Hub, name: str, files: list[str]) -> None:
    found = find_model(name)
    assert found.path.endswith(files[0])
    for file in files:
        wanted = REPOSITORIES[str(hub_name(name).repo)][file]  # type: ignore[union-attr]
        assert (Path(found.path).parents[file.count("/")] / file).read_bytes() == wanted
    fetched = {file for file in hub.sent if file.endswith(".gguf")}
    assert fetched >= set(files)
    assert "mmproj-F16.gguf" not in fetched


@pytest.mark.parametrize("name", ["owner/demo", "owner/mixed", "lonely"])
def test_a_checkpoint_is_fetched_without_what_is_not_needed(hub: Hub, name: str) -> None:
    folder = Path(find_model(name).path)
    assert {path.name for path in folder.rglob("*") if path.is_file()} == set(DEMO)
    assert all((folder / file).read_bytes() == data for file, data in DEMO.items())


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("owner/Tiny-GGUF:Q5_K_M", ["no quantisation Q5_K_M", "Q2_K (", "Q4_K_M (", "Q8_0 ("]),
        ("owner/Tiny-GGUF/Tiny-Q9.gguf", ["no file Tiny-Q9.gguf", "Q4_K_M ("]),
        ("owner/demo:Q8_0", ["no GGUF files", "model.safetensors"]),
        ("owner/eyes-GGUF", ["no GGUF file of a model", "Tiny-mmproj-F16.gguf"]),
        ("owner/eyes-GGUF:F16", ["no GGUF files of a model", "Tiny-mmproj-F16.gguf"]),
        ("owner/Tiny-GGUF:latest", ["no quantisation latest", "Q2_K ("]),
        ("owner/Again-GGUF:Q8_0", ["several files", "Big-Q8_0-00001-of-00003.gguf"]),
        (
            "owner/Again-GGUF/Big-Q8_0-00003-of-00003.gguf",
            ["lacks 1 of the parts of Big-Q8_0-00001-of-00003"],
        ),
        (
            "hf.co/owner/Folders-GGUF/tree/main/onnx",
            ["the folder onnx of owner/Folders-GGUF", "from the top"],
        ),
        ("hf.co/owner/Folders-GGUF/tree/main/none", ["the folder none of owner/Folders-GGUF has no model"]),
        ("owner/Two-GGUF", ["several files", "a-Q4_K_M.gguf, b-Q4_K_M.gguf"]),
        ("owner/text", ["no model", "README.md, notes.txt"]),
        ("owner/empty", ["no model", "It is empty"]),
        ("owner/nothing", ["no model owner/nothing on the hub", "HF_TOKEN"]),
        ("nothing", ["no path nothing", "no model nothing on the hub"]),
        ("owner/demo@v9", ["no revision v9"]),
        ("owner/gated", ["is gated", "HF_TOKEN"]),
        ("nothing.gguf", ["no file nothing.gguf"]),
        ("a/b/c", ["no file or folder a/b/c", "owner/repository, after which @REVISION"]),
        ("./a/b/c", ["no file or folder ./a/b/c"]),
    ],
)
def test_a_wrong_name_is_answered_with_what_there_is(hub: Hub, name: str, words: list[str]) -> None:
    with pytest.raises(ModelLoadError) as caught:
        find_model(name)
    message = str(caught.value)
    assert [word for word in words if word not in message] == []
    assert "\n" not in message


def test_a_token_opens_a_gated_repository(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_TOKEN", "right")
    assert (Path(find_model("owner/gated").path) / "config.json").exists()


def test_what_is_fetched_is_not_fetched_again_and_is_found_without_a_network(
    hub: Hub, monkeypatch: pytest.MonkeyPatch
) -> None:
    names = ["owner/Tiny-GGUF", "owner/demo", "owner/Split-GGUF:Q4_K_M", "owner/demo@v1"]
    before = [find_model(name).path for name in names]
    sent = dict(hub.sent)
    assert [find_model(name).path for name in names] == before
    assert hub.sent == sent
    point_to("http://127.0.0.1:9", monkeypatch)  # nothing listens there
    assert [find_model(name).path for name in names] == before
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    assert [find_model(name).path for name in names] == before
    with pytest.raises(ModelLoadError, match="hub cannot be reached"):
        find_model("owner/Few-GGUF")


def test_a_connection_that_breaks_off_is_taken_up_again(hub: Hub) -> None:
    hub.repositories["owner/large"].break_after["Large-Q4_K_M.gguf"] = 12 << 20
    heard: list[Progress] = []
    assert Path(find_model("owner/large", tell=heard.append).path).read_bytes() == LARGE
    assert heard[-1] == Progress("owner/large", len(LARGE), len(LARGE))
    done = [each.done for each in heard]
    assert done == sorted(done)


def test_of_a_fetch_that_is_killed_whole_files_are_kept(hub: Hub, tmp_path: Path) -> None:
    home = tmp_path / "home"
    environment = {name: value for name, value in os.environ.items() if name != "HF_HUB_OFFLINE"} | {
        "HF_ENDPOINT": hub.url,
        "HF_HOME": str(home),
    }
    first, second = (f"Large-Q4_K_M-0000{number}-of-00002.gguf" for number in (1, 2))
    hub.hold_after[second] = 1 << 20
    command = [sys.executable, "-m", "truedraft", "pull", "owner/parts"]
    with subprocess.Popen(command, env=environment, cwd=ROOT, stderr=subprocess.DEVNULL) as process:
        while process.poll() is None:
            if any(home.rglob(first)):
                process.kill()
            time.sleep(0.01)
    hub.hold_after.clear()
    assert not any(home.rglob(second))
    done = subprocess.run(command, env=environment, cwd=ROOT, capture_output=True, text=True, check=True)
    assert Path(done.stdout.strip()).with_name(second).read_bytes() == LARGE
    assert "Fetching owner/parts: 50 MB of 50 MB" in done.stderr
    assert hub.sent[first] == len(LARGE)


def test_without_a_default_the_largest_that_fits_is_taken_and_said() -> None:
    files = [RepoFile(f"m-{label}.gguf", size) for label, size in (("Q3_K_M", 3), ("Q6_K", 6), ("Q8_0", 8))]
    name = HubName("owner/repo")
    choice = choose(name, files, free_bytes=7)
    assert (choice.entry, "Q6_K" in choice.note, "owner/repo:QUANT" in choice.note) == (
        "m-Q6_K.gguf",
        True,
        True,
    )
    assert choose(HubName("owner/repo", quant="Q8_0"), files, free_bytes=1).entry == "m-Q8_0.gguf"
    with pytest.raises(ModelLoadError, match="smallest is Q3_K_M"):
        choose(name, files, free_bytes=2)
    with_default = [*files, RepoFile("m-Q4_K_M.gguf", 4)]
    assert choose(name, with_default, free_bytes=100).entry == "m-Q4_K_M.gguf"
    assert choose(name, with_default, free_bytes=3).entry == "m-Q3_K_M.gguf"
    assert "does not fit" in choose(name, with_default, free_bytes=3).note


@pytest.mark.parametrize(
    ("file", "label"),
    [
        ("Qwen3-8B-Q4_K_M.gguf", "Q4_K_M"),
        ("qwen3-8b-q4_k_m.gguf", "Q4_K_M"),
        ("model.Q8_0.gguf", "Q8_0"),
        ("gemma-UD-IQ2_XXS.gguf", "UD-IQ2_XXS"),
        ("gpt-oss-20b-mxfp4.gguf", "MXFP4"),
        ("Llama-3.2-1B-BF16.gguf", "BF16"),
        ("phi-4-F16-00001-of-00003.gguf", "F16"),
        ("SmolLM2-135M-Instruct.Q4_1.gguf", "Q4_1"),
        ("plain.gguf", "plain"),
    ],
)
def test_labels_of_quantisations(file: str, label: str) -> None:
    assert [variant.label for variant in variants([RepoFile(file, 1)])] == [label]


def test_drafters_beside_a_model_are_no_models_and_are_told(hub: Hub) -> None:
    files = [RepoFile(name, 1) for name in REPOSITORIES["owner/Heads-GGUF"]]
    assert {variant.parts[0].name for variant in drafters(files)} == {
        "mtp-Tiny-Q8_0.gguf",
        "eagle3-Tiny-F16.gguf",
    }
    found = find_model("owner/Heads-GGUF")
    assert found.path.endswith("Tiny-Q4_K_M.gguf")
    assert set(found.drafters) == {
        "owner/Heads-GGUF/mtp-Tiny-Q8_0.gguf",
        "owner/Heads-GGUF/eagle3-Tiny-F16.gguf",
    }


@pytest.mark.parametrize(
    ("changes", "fetched"),
    [
        ({}, True),
        ({"draft": None}, False),
        ({"draft": "none"}, False),
        ({"method": "ngram"}, False),
        ({"num_speculative_tokens": 0}, False),
    ],
)
def test_a_small_drafter_is_fetched_where_the_draft_is_left_open(
    hub: Hub, changes: dict[str, Any], fetched: bool
) -> None:
    said: list[str] = []
    config = located(EngineConfig(target="owner/Heads-GGUF", **changes), say=said.append)
    folder = Path(str(config.target)).parent
    assert {path.name for path in folder.iterdir()} == {
        "Tiny-Q4_K_M.gguf",
        *(["mtp-Tiny-Q8_0.gguf"] if fetched else []),
    }
    if fetched:
        assert [Path(each.path).name for each in siblings(str(config.target))] == ["mtp-Tiny-Q8_0.gguf"]
        assert any("mtp-Tiny-Q8_0.gguf (1 bytes) is fetched, too" in line and "25%" in line for line in said)
    assert any("owner/Heads-GGUF/eagle3-Tiny-F16.gguf" in line for line in said)


@pytest.mark.parametrize("share", [0.24, 0.26])
def test_a_large_drafter_is_only_listed(hub: Hub, monkeypatch: pytest.MonkeyPatch, share: float) -> None:
    files = {"Tiny-Q4_K_M.gguf": b"x" * 100, "mtp-Tiny.gguf": b"m" * int(100 * share)}
    monkeypatch.setitem(hub.repositories, "owner/Heads-GGUF", Repository(files))
    found = find_model("owner/Heads-GGUF", with_drafter=True)
    assert bool(found.fetched_drafter) == (share < 0.25)


@pytest.mark.parametrize("name", ["drafting-model-Q4_K_M.gguf", "Draftsman-Q4_K_M.gguf", "smtp-Q4_K_M.gguf"])
def test_words_that_contain_a_drafters_name_are_models(name: str) -> None:
    assert len(variants([RepoFile(name, 1)])) == 1


def test_a_pair_by_its_names_writes_what_the_paths_write(hub: Hub) -> None:
    params = SamplingParams(max_tokens=24, seed=3)
    fields = {"num_threads": 1, "cache_memory": "32MiB", "num_speculative_tokens": 3}
    stages: list[str] = []
    with LLM("owner/demo", draft="owner/draft", begin=stages.append, **fields) as named:
        answer = named.generate("Once upon a time", params)[0]
        assert (named.config.target, named.config.draft) == ("owner/demo", "owner/draft")
    assert any(stage.startswith("owner/demo: ") and " MB of " in stage for stage in stages)
    with LLM(**fields) as bundled:
        assert bundled.generate("Once upon a time", params)[0].token_ids == answer.token_ids


@pytest.mark.parametrize("draft", ["mtp", "auto", "self:int4", None, "none"])
def test_ways_to_draft_are_no_names(draft: str | None) -> None:
    target = str(BUNDLED_PAIR / "target")
    config = EngineConfig(target=target, draft=draft)
    assert located(config) == config


def test_list_and_rm(hub: Hub, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    assert main(["list"]) == 0
    assert "The cache is empty" in capsys.readouterr().err
    for name in ("owner/demo", "owner/Tiny-GGUF:Q8_0", "owner/Tiny-GGUF"):
        assert main(["pull", name]) == 0
    paths = capsys.readouterr().out.split()
    assert all(Path(path).exists() for path in paths)
    assert sorted(model.path for model in stored_models()) == sorted(paths)
    assert main(["list", "--paths"]) == 0
    assert sorted(capsys.readouterr().out.split()) == sorted(paths)
    assert main(["list"]) == 0
    shown = capsys.readouterr()
    assert "owner/demo" in shown.out
    assert "fused" in shown.out
    assert "owner/Tiny-GGUF:Q8_0 cannot be served" in shown.err  # it is no real file
    assert max(map(len, shown.out.splitlines())) <= 80
    assert main(["rm", "owner/Tiny-GGUF:Q8_0"]) == 0
    assert {model.name for model in stored_models()} == {"owner/demo", "owner/Tiny-GGUF:Q4_K_M"}
    assert main(["rm", "owner/demo"]) == 0
    assert {model.name for model in stored_models()} == {"owner/Tiny-GGUF:Q4_K_M"}
    capsys.readouterr()
    assert main(["rm", "owner/nothing"]) == 1
    assert "It has owner/Tiny-GGUF" in capsys.readouterr().err


def test_what_was_removed_in_part_is_fetched_again(hub: Hub) -> None:
    find_model("owner/Tiny-GGUF:Q8_0")
    find_model("owner/Tiny-GGUF:Q2_K")
    assert remove("owner/Tiny-GGUF:Q8_0") == len(REPOSITORIES["owner/Tiny-GGUF"]["Tiny-Q8_0.gguf"])
    sent = dict(hub.sent)
    assert Path(find_model("owner/Tiny-GGUF:Q8_0").path).read_bytes().startswith(b"Q8_0")
    assert hub.sent["Tiny-Q8_0.gguf"] == 2 * sent["Tiny-Q8_0.gguf"]
    assert hub.sent["Tiny-Q2_K.gguf"] == sent["Tiny-Q2_K.gguf"]


def test_modules_after_a_model_are_fetched() -> None:
    """What makes vectors of states is in folders of their own; other folders have other forms of weights."""
    wanted = ["config.json", "model.safetensors", "modules.json", "1_Pooling/config.json"]
    wanted += ["2_Dense/config.json", "2_Dense/model.safetensors", "1_LogitScore/config.json"]
    others = ["onnx/config.json", "onnx/model.safetensors", "2_Dense/a.bin", "a/1_Pooling/config.json"]
    found = checkpoint_files([RepoFile(name, 1) for name in [*wanted, *others]])
    assert sorted(file.name for file in found) == sorted(wanted)
