"""LoRA adapters over HTTP, with a real worker: chosen by name, listed, loaded and unloaded as it serves."""

import os
import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
from pydantic import ValidationError

from tests.adapters import save_adapter
from tests.server.running import serving, wait_for
from truedraft.engine.commands.options import GenerateSettings, check_adapters
from truedraft.engine.config import BUNDLED_PAIR, EngineConfig
from truedraft.engine.errors import ConfigError, ModelLoadError
from truedraft.engine.llm import LLM, SamplingParams
from truedraft.engine.messages import Adapter
from truedraft.server.cli.launch import make_app
from truedraft.server.cli.settings_sources import load_settings
from truedraft.server.errors import InvalidRequestError
from truedraft.server.models.adapters import ServedAdapters
from truedraft.server.services import Services
from truedraft.server.settings import Settings

TARGET = str(BUNDLED_PAIR / "target")
BASE = "truedraft-demo"
ATTENTION = ["q_proj", "v_proj", "o_proj"]
PROMPT = "Once upon a time there was a little girl who"


@dataclass
class Server:
    client: httpx.Client
    services: Services

    def ask(self, model: str, **body: Any) -> httpx.Response:
        given = {"model": model, "prompt": PROMPT, "max_tokens": 16, "temperature": 0} | body
        return self.client.post("/v1/completions", json=given)

    def text(self, model: str, **body: Any) -> str:
        answer = self.ask(model, **body)
        assert answer.status_code == 200, answer.text
        text: str = answer.json()["choices"][0]["text"]
        return text

    def load(self, name: str, path: str, **body: Any) -> httpx.Response:
        return self.client.post("/v1/load_lora_adapter", json={"lora_name": name, "lora_path": path} | body)

    def unload(self, name: str) -> httpx.Response:
        return self.client.post("/v1/unload_lora_adapter", json={"lora_name": name})


@contextmanager
def served(**settings: Any) -> Iterator[Server]:
    """Serves the bundled target, with a worker of its own."""
    chosen = {"draft": "none", "device": "cpu", "num_threads": 1, "cache_memory": "64MiB"} | settings
    app = make_app(Settings(target=TARGET, served_model_name=BASE, **chosen))
    with serving(app) as client:
        yield Server(client, app.state.services)


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    folder = tmp_path_factory.mktemp("adapters")
    return [save_adapter(folder / f"of-{seed}", TARGET, ATTENTION, seed) for seed in range(4)]


@pytest.fixture(scope="module")
def server(folders: list[str]) -> Iterator[Server]:
    with served(lora_modules=[f"one={folders[0]}"], allow_lora_updating=True, max_loras=3) as running:
        yield running


@pytest.fixture(scope="module")
def expected(folders: list[str]) -> list[str]:
    """Returns the text of each adapter, by the library, and that without one."""
    modules = [f"a{number}={folder}" for number, folder in enumerate(folders)]
    params = SamplingParams(max_tokens=16, temperature=0)
    with LLM(TARGET, draft="none", device="cpu", lora_modules=modules) as llm:
        names = [*(f"a{number}" for number in range(len(folders))), None]
        texts = [llm.generate(PROMPT, params, model=name, progress=False)[0].text for name in names]
    assert len(set(texts)) == len(texts)
    return texts


def test_model_chooses_an_adapter(server: Server, expected: list[str]) -> None:
    assert server.text("one") == server.text(f"{BASE}:one") == expected[0]
    assert server.text(BASE) == expected[-1]
    for name in ("two", f"{BASE}:two", "one:one", f"{BASE}:"):
        answer = server.ask(name)
        assert answer.status_code == 404, name
        assert f"'{name}' does not exist; this server has '{BASE}, one'" in answer.json()["error"]["message"]


def test_every_endpoint_takes_an_adapter(server: Server) -> None:
    chat = {"messages": [{"role": "user", "content": "Hello"}], "max_tokens": 8, "temperature": 0}
    texts = [
        server.client.post("/v1/chat/completions", json=chat | {"model": name}).json()["choices"]
        for name in (BASE, "one")
    ]
    assert texts[0] != texts[1]
    question = {"type": "predicate", "instructions": "Is this a story?"}
    asked = {"input": "A story", "questions": [question]}
    answers = [
        server.client.post("/v1/decisions", json=asked | {"model": name}).json()["answers"]
        for name in (BASE, "one")
    ]
    assert answers[0] != answers[1]


def test_fingerprints_differ(server: Server) -> None:
    prints = {server.ask(name).json()["system_fingerprint"] for name in (BASE, "one", f"{BASE}:one")}
    assert len(prints) == 2


def test_cards_name_the_parent(server: Server) -> None:
    cards = {card["id"]: card for card in server.client.get("/v1/models").json()["data"]}
    assert {name: (card["parent"], card["root"]) for name, card in cards.items()} == {
        BASE: (None, f"{BASE}/target"),
        "one": (BASE, "of-0"),
    }
    assert server.client.get("/v1/models/one").json() == cards["one"]


def test_adapters_come_and_go(server: Server, folders: list[str], expected: list[str]) -> None:
    assert server.load("two", folders[1]).json() == {"success": True}
    assert server.text("two") == expected[1]
    answer = server.load("two", folders[2])
    assert answer.status_code == 400
    assert "load_inplace" in answer.json()["error"]["message"]
    assert server.load("two", folders[2], load_inplace=True).status_code == 200
    assert server.text("two") == expected[2]
    assert server.load("three", folders[3]).status_code == 200
    full = server.load("four", folders[1])
    assert (full.status_code, "max_loras is 3" in full.text) == (400, True)
    for name in ("two", "three"):
        assert server.unload(name).status_code == 200
        assert server.ask(name).status_code == 404
        assert server.unload(name).status_code == 404
    assert server.unload(BASE).status_code == 400


def test_an_adapter_is_no_model_to_unload(server: Server) -> None:
    """Whoever names one would unload, or clear, what others use."""
    for path, body in (("/models/unload", {"model": "one"}), ("/prefix_cache/clear?model=one", {})):
        answer = server.client.post(path, json=body)
        assert (answer.status_code, "is a LoRA adapter" in answer.text) == (400, True)


def test_an_adapter_of_the_settings_is_replaced_and_comes_back(
    server: Server, folders: list[str], expected: list[str]
) -> None:
    assert server.load("one", folders[1], load_inplace=True).status_code == 200
    assert server.text("one") == expected[1]
    assert server.load("one", folders[0], load_inplace=True).status_code == 200
    assert server.text("one") == expected[0]


@pytest.mark.parametrize("name", ["", "a:b", "a b", BASE])
def test_names_that_requests_could_not_use(server: Server, folders: list[str], name: str) -> None:
    answer = server.load(name, folders[1])
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == "lora_name"


def test_what_cannot_be_loaded_says_why(server: Server, folders: list[str], tmp_path: Path) -> None:
    answer = server.load("bad", str(tmp_path))
    assert answer.status_code == 400
    assert "has no adapter_config.json" in answer.json()["error"]["message"]
    assert server.ask("bad").status_code == 404
    assert server.load("bad", folders[1], other=1).status_code == 400


def test_nothing_is_wrong_or_lost_while_adapters_are_replaced(
    server: Server, folders: list[str], expected: list[str]
) -> None:
    assert server.load("two", folders[1]).status_code == 200
    names = [BASE, "one", "two"] * 12
    allowed = {BASE: {expected[-1]}, "one": {expected[0]}, "two": {expected[1], expected[2]}}
    with ThreadPoolExecutor(6) as threads:
        answers = threads.map(server.ask, names)
        for number in range(6):
            assert server.load("two", folders[1 + number % 2], load_inplace=True).status_code == 200
            assert server.load("brief", folders[3]).status_code == 200
            assert server.unload("brief").status_code == 200
        for name, answer in zip(names, answers, strict=True):
            assert answer.status_code == 200, answer.text
            assert answer.json()["choices"][0]["text"] in allowed[name]
    assert server.unload("two").status_code == 200


def test_metrics_name_adapters_in_use(server: Server) -> None:
    text = server.client.get("/metrics").text
    assert 'truedraft_lora_requests_info{max_lora="3"' in text.replace(f'model_name="{BASE}",', "")


def test_a_worker_that_is_restarted_loads_what_requests_ask_for(
    server: Server, folders: list[str], expected: list[str]
) -> None:
    assert server.load("two", folders[1]).status_code == 200
    (worker,) = server.services.models.first.workers
    before = worker.pid
    assert before is not None
    os.kill(before, signal.SIGKILL)
    wait_for(lambda: worker.pid not in (before, None) and server.ask(BASE).status_code == 200, "a worker")
    assert server.text("two") == expected[1]
    assert server.text("one") == expected[0]
    assert server.unload("two").status_code == 200


def test_keys_need_rights(folders: list[str], tmp_path: Path) -> None:
    keys = tmp_path / "keys"
    keys.write_text(f"all operate\nbase models={BASE}\nown models=one\n")
    with served(lora_modules=[f"one={folders[0]}"], api_key_file=keys) as running:

        def status(key: str, model: str) -> int:
            running.client.headers["Authorization"] = f"Bearer {key}"
            return running.ask(model, max_tokens=1).status_code

        assert [status("base", name) for name in (BASE, "one", f"{BASE}:one")] == [200, 200, 200]
        assert [status("own", name) for name in (BASE, "one", f"{BASE}:one")] == [404, 200, 200]
        assert [card["id"] for card in running.client.get("/v1/models").json()["data"]] == ["one"]
        assert running.unload("one").status_code == 403
        running.client.headers["Authorization"] = "Bearer all"
        answer = running.load("two", folders[1])
        assert (answer.status_code, "allow_lora_updating" in answer.text) == (403, True)


def test_a_key_of_an_adapter_alone_may_unload_it(folders: list[str], tmp_path: Path) -> None:
    keys = tmp_path / "keys"
    keys.write_text("own operate models=one\n")
    with served(lora_modules=[f"one={folders[0]}"], api_key_file=keys, allow_lora_updating=True) as running:
        running.client.headers["Authorization"] = "Bearer own"
        assert running.ask("one", max_tokens=1).status_code == 200
        assert running.unload("one").status_code == 200
        assert running.ask("one", max_tokens=1).status_code == 404
        assert running.load("one", folders[1]).status_code >= 400  # the model is another's


def test_flags_have_one_value_or_several() -> None:
    for flags in (
        ["--lora-modules", "a=x", "b=y"],
        ["--lora-modules=a=x", "b=y"],
        ["--lora-modules", "a=x,b=y"],
        ["--lora-modules", "a=x", "--lora-modules", "b=y"],
        ["--lora-modules", "a=x", "b=y", "--max-loras", "2"],
    ):
        assert load_settings(flags).lora_modules == ["a=x", "b=y"], flags


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"lora_modules": ["x"]}, "name=path is needed"),
        ({"lora_modules": ["a:b=x"]}, "'a:b' is no name of a LoRA adapter"),
        ({"lora_modules": ["a=x", "a=y"]}, "two adapters of the name a"),
        ({"lora_modules": ["a=x", "b=y"], "max_loras": 1}, "max_loras is 1"),
        ({"lora_modules": [f"{BASE}=x"]}, "is the model's own name"),
    ],
)
def test_settings_that_cannot_be(settings: dict[str, Any], words: str) -> None:
    with pytest.raises(ValidationError, match=words):
        Settings(**settings)


def test_commands_without_requests_refuse_adapters() -> None:
    with pytest.raises(ModelLoadError, match="leave it out here"):
        check_adapters(GenerateSettings(prompt="x", lora_modules=["a=b"]))
    check_adapters(EngineConfig())


def test_the_library_names_a_wrong_setting() -> None:
    with pytest.raises(ConfigError, match="name=path is needed"):
        LLM(lora_modules=["x"])


class Workers:
    """Stands for an engine whose workers answer as given, and keeps what they are told to forget."""

    def __init__(self, *answers: Adapter | BaseException) -> None:
        self.answers = answers
        self.unloaded: list[str] = []
        self.state = SimpleNamespace(worker=None)

    async def load_adapter(self, name: str, path: str) -> list[Adapter | BaseException]:
        return list(self.answers)

    def unload_adapter(self, digest: str) -> None:
        self.unloaded.append(digest)


@pytest.mark.parametrize(
    ("answers", "error", "unloaded"),
    [
        (("d1", "d1"), None, []),
        (("d1", "d2"), "have changed while they were read", ["d1", "d2"]),
        (("d1", InvalidRequestError("It is full.")), "It is full", ["d1"]),
    ],
)
async def test_workers_have_the_same_adapter_or_none(
    answers: tuple[Any, ...], error: str | None, unloaded: list[str]
) -> None:
    adapters = ServedAdapters(Settings(max_loras=2))
    workers: Any = Workers(*(Adapter("a", "/a", one, 1) if isinstance(one, str) else one for one in answers))
    loading = adapters.load("a", "/a", workers, lambda: (), replaces=False)
    if error is None:
        assert (await loading).digest == "d1"
    else:
        with pytest.raises(InvalidRequestError, match=error):
            await loading
    assert workers.unloaded == unloaded
    assert adapters.names == ([] if error else ["a"])


async def test_a_name_that_another_model_gets_meanwhile_is_taken() -> None:
    adapters, calls = ServedAdapters(Settings(max_loras=2)), iter([(), ("a",)])
    workers: Any = Workers(Adapter("a", "/a", "d1", 1))
    with pytest.raises(InvalidRequestError, match="already"):
        await adapters.load("a", "/a", workers, lambda: next(calls), replaces=False)
    assert (adapters.names, workers.unloaded) == ([], ["d1"])
