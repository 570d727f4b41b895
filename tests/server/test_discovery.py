"""What local clients ask first, in the shapes of the servers that they know; and paths that are not here."""

import pytest

from tests.server.conftest import StartServer
from tests.server.running import MODEL, RunningServer
from truedraft.server.http.foreign_paths import INSTEAD
from truedraft.server.version import package_version


def test_ollamas_clients_find_the_model(server: RunningServer) -> None:
    assert server.get("/api/version").json() == {"version": package_version()}
    (model,) = server.get("/api/tags").json()["models"]
    assert model["name"] == model["model"] == MODEL
    assert model["digest"].startswith("fp_")
    shown = server.client.post("/api/show", json={"name": MODEL}).json()
    assert shown["model_info"]["general.context_length"] == 512
    assert shown["capabilities"] == ["completion", "tools", "insert"]
    assert "messages" in shown["template"]
    assert shown["details"] == model["details"]


def test_llama_cpps_clients_learn_the_context(server: RunningServer) -> None:
    props = server.get("/props").json()
    assert props["default_generation_settings"]["n_ctx"] == 512
    assert props["total_slots"] == 32
    assert "messages" in props["chat_template"]
    assert props["modalities"] == {"vision": False, "audio": False}


def test_they_need_a_key_where_others_do(start_server: StartServer) -> None:
    with start_server(api_keys=["secret-key-1"]) as server:
        for path in ("/api/tags", "/api/version", "/props"):
            assert server.get(path).status_code == 401
            assert server.get(path, headers={"authorization": "Bearer secret-key-1"}).status_code == 200


@pytest.mark.parametrize(
    ("path", "words"),
    [
        ("/api/chat", "POST /v1/chat/completions"),
        ("/api/generate/", "POST /v1/completions"),
        ("/v1/audio/transcriptions", "text only"),
        ("/v1/files/x/content", "nothing is stored"),
        ("/completion", "POST /v1/completions"),
        ("/v1/systemone", "POST /v1/decisions"),
    ],
)
def test_paths_of_others_say_what_is_here(server: RunningServer, path: str, words: str) -> None:
    response = server.post(path, {"prompt": "x"})
    assert response.status_code == 404
    assert words in response.json()["error"]["message"]


def test_every_path_that_is_named_instead_exists_and_none_that_exists_is_named(server: RunningServer) -> None:
    known = set(server.get("/openapi.json").json()["paths"]) | {"/metrics"}
    for path, words in INSTEAD.items():
        assert path not in known
        named = [word for word in words.split() if word.startswith("/")]
        assert {word.rstrip(",") for word in named} <= known
    assert "Did you mean" in server.get("/v2/models").json()["error"]["message"]
