"""``/tokenize`` and ``/detokenize``: the ids a request would use, there and back."""

import json
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer as FastTokenizer

from tests.server.conftest import StartServer
from tests.server.refusals import refused
from tests.server.running import MODEL, RunningServer
from tests.server.tiny_tokenizer import write_tokenizer
from truedraft.server.text.tokenizer import load_tokenizer

CONTEXT = 512  # the fake worker's
HELLO = [{"role": "user", "content": "Hi"}]


@pytest.mark.parametrize("text", ["", " ", "héllo 😀", "<|im_end|>", "\x00\n"])
def test_there_and_back(server: RunningServer, text: str) -> None:
    answer = server.post("/tokenize", {"prompt": text}).json()
    assert set(answer) == {"count", "max_model_len", "tokens"}
    assert (answer["count"], answer["max_model_len"]) == (len(answer["tokens"]), CONTEXT)
    assert server.post("/detokenize", {"tokens": answer["tokens"]}).json() == {"prompt": text}


def test_texts_of_tokens(server: RunningServer) -> None:
    answer = server.post("/tokenize", {"prompt": "hé<|im_end|>", "return_token_strs": True}).json()
    assert answer["token_strs"] == ["h", "\\xc3", "\\xa9", "<|im_end|>"]


def test_messages_count_as_in_a_chat(server: RunningServer) -> None:
    answer = server.post("/tokenize", {"messages": HELLO}).json()
    chat = server.post("/v1/chat/completions", {"messages": HELLO, "max_tokens": 1, "return_token_ids": True})
    assert answer["tokens"] == chat.json()["prompt_token_ids"]
    without = server.post("/tokenize", {"messages": HELLO, "add_generation_prompt": False}).json()
    assert answer["tokens"][: without["count"]] == without["tokens"]
    assert answer["count"] > without["count"]


def test_model_may_be_left_out_but_not_be_wrong(server: RunningServer) -> None:
    for path, body in (("/tokenize", {"prompt": "x"}), ("/detokenize", {"tokens": [120]})):
        assert server.client.post(path, json=body).status_code == 200
        assert server.client.post(path, json=body | {"model": MODEL}).status_code == 200
        response = server.client.post(path, json=body | {"model": "gpt-9"})
        assert (response.status_code, response.json()["error"]["code"]) == (404, "model_not_found")


@pytest.mark.parametrize(
    ("path", "fields", "param", "code"),
    [
        ("/tokenize", {}, "prompt", "missing_required_parameter"),
        ("/tokenize", {"prompt": "x", "messages": HELLO}, "messages", "invalid_value"),
        ("/tokenize", {"prompt": ["x"]}, "prompt", "invalid_type"),
        ("/tokenize", {"prompt": "x", "chat_template": "x"}, "chat_template", "unsupported_parameter"),
        (
            "/tokenize",
            {"prompt": "x", "add_generation_prompt": True},
            "add_generation_prompt",
            "invalid_value",
        ),
        ("/tokenize", {"prompt": "x", "add_special_tokens": 1}, "add_special_tokens", "invalid_type"),
        ("/tokenize", {"messages": []}, "messages", "invalid_value"),
        ("/tokenize", {"messages": [{"role": "robot"}]}, "messages.0.role", "invalid_value"),
        (
            "/tokenize",
            {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]},
            "messages.0.content.0.type",
            "unsupported_parameter",
        ),
        ("/detokenize", {}, "tokens", "missing_required_parameter"),
        ("/detokenize", {"tokens": "x"}, "tokens", "invalid_type"),
        ("/detokenize", {"tokens": [-1]}, "tokens.0", "invalid_value"),
        ("/detokenize", {"tokens": [5, 260]}, "tokens", "invalid_value"),
        ("/detokenize", {"tokens": [10**400]}, "tokens", "invalid_value"),
        ("/detokenize", {"tokens": [5, 1.5]}, "tokens.1", "invalid_type"),
    ],
)
def test_mistakes(server: RunningServer, path: str, fields: dict[str, Any], param: str, code: str) -> None:
    error = refused(server, path, fields)
    assert (error["param"], error["code"]) == (param, code)


def test_not_while_loading_and_not_without_a_key(start_server: StartServer) -> None:
    with start_server(wait=False, api_keys=["one"]) as server:
        key = {"authorization": "Bearer one"}
        for path, body in (("/tokenize", {"prompt": "x"}), ("/detokenize", {"tokens": [1]})):
            assert server.post(path, body).status_code == 401
            response = server.post(path, body, headers=key)
            assert (response.status_code, response.headers["retry-after"]) == (503, "2")


@pytest.mark.parametrize("side", ["left", "right"])
def test_a_tokenizer_that_was_saved_after_training_neither_cuts_nor_pads(tmp_path: Path, side: str) -> None:
    folder = write_tokenizer(tmp_path / "model")
    fast = FastTokenizer.from_file(str(folder / "tokenizer.json"))
    fast.enable_truncation(8, direction=side)
    fast.enable_padding(length=16, direction=side, pad_id=259, pad_token="<|pad|>")
    fast.save(str(folder / "tokenizer.json"))
    tokenizer = load_tokenizer(str(folder))
    for text in ("abc", 20 * "abc"):
        assert tokenizer.encode(text, add_special_tokens=True) == [*text.encode()]
    written = json.loads(tokenizer.for_grammars()["tokenizer"])
    assert (written["truncation"], written["padding"]) == (None, None)
