"""``/v1/embeddings``, ``/v1/rerank`` and ``/v1/score`` around a worker whose vectors tell what it was sent.

Token ids are bytes here. A vector has the number of a text's tokens, their sum, where the second text of a
pair begins, and 1.
"""

import base64
from array import array
from collections.abc import Iterator
from itertools import product
from pathlib import Path
from typing import Any

import pytest
from openai import OpenAI

from tests.server.conftest import StartServer
from tests.server.refusals import error_of
from tests.server.running import MODEL, RunningServer
from tests.vector_tokenizer import write_tokenizer
from truedraft.engine.messages import EmbeddingFacts
from truedraft.server.errors import InvalidRequestError
from truedraft.server.schemas.embeddings import RerankRequest
from truedraft.server.text import vector_texts
from truedraft.server.text.prompt import PromptLimits
from truedraft.server.text.tokenizer import Tokenizer, load_tokenizer

EMBED = "/v1/embeddings"


@pytest.fixture
def server(vector_server: RunningServer) -> RunningServer:
    vector_server.wait_until_idle()
    return vector_server


@pytest.fixture
def reranker(start_server: StartServer) -> Iterator[RunningServer]:
    with start_server("--task", "rerank") as running:
        yield running


def vectors(server: RunningServer, **body: Any) -> list[list[float]]:
    answer = server.post(EMBED, body)
    assert answer.status_code == 200, answer.text
    data = answer.json()["data"]
    assert [each["index"] for each in data] == [*range(len(data))]
    return [each["embedding"] for each in data]


def tokens(server: RunningServer, **body: Any) -> list[list[int]]:
    """Returns the token ids that the worker got for each text."""
    before = len(server.messages_to_worker("Embed"))
    assert server.post(EMBED, body).status_code == 200
    line = server.messages_to_worker("Embed")[before]
    return [
        [int(number) for number in part.split("]")[0].split(", ") if number]
        for part in line.split("token_ids=[")[1:]
    ]


def refused(server: RunningServer, path: str = EMBED, **body: Any) -> dict[str, Any]:
    answer = server.post(path, body)
    assert answer.status_code == 400, answer.text
    return error_of(answer)


def test_openai_client(server: RunningServer) -> None:
    """OpenAI's client asks for base64 by itself, and decodes it."""
    client = OpenAI(base_url=f"{server.url}/v1", api_key="-")
    answer = client.embeddings.create(model=MODEL, input=["ab", "c"])
    assert [each.embedding for each in answer.data] == [[2.0, 195.0, 0.0, 1.0], [1.0, 99.0, 0.0, 1.0]]
    assert (answer.object, answer.model, answer.usage.prompt_tokens) == ("list", MODEL, 3)
    assert client.embeddings.create(model=MODEL, input="ab", dimensions=2).data[0].embedding == [2.0, 195.0]


def test_forms_of_input(server: RunningServer) -> None:
    text = vectors(server, input="ab")
    assert vectors(server, input=["ab", "ab"]) == text * 2
    assert vectors(server, input=[97, 98]) == text
    assert vectors(server, input=[[97, 98], [97, 98]]) == text * 2
    assert vectors(server, input=[0]) == [[1.0, 0.0, 0.0, 1.0]]


def test_base64(server: RunningServer) -> None:
    (written,) = vectors(server, input="ab", encoding_format="base64")
    assert isinstance(written, str)
    assert array("f", base64.b64decode(written)).tolist() == vectors(server, input="ab")[0]


@pytest.mark.parametrize(
    ("body", "param", "words"),
    [
        ({"input": []}, "input", ""),
        ({"input": ""}, "input", "no tokens"),
        ({"input": ["a", ""]}, "input", "Text 1"),
        ({"input": [[]]}, "input", ""),
        ({"input": [-1]}, "input", ""),
        ({"input": [260]}, "input", "260"),
        ({"input": ["a", 1]}, "input", ""),
        ({"input": "a" * 600}, "input", "'truncate_prompt_tokens': -1"),
        ({"input": [[65] * 513]}, "input", "513"),
        ({"input": "a", "dimensions": 0}, "dimensions", ""),
        ({"input": "a", "dimensions": 1}, "dimensions", "2, 3, 4"),
        ({"input": "a", "dimensions": 5}, "dimensions", "2, 3, 4"),
        ({"input": "a", "encoding_format": "int8"}, "encoding_format", ""),
        ({"input": "a", "prompt_name": "x"}, "prompt_name", "'query', 'document'"),
        ({"input": "a", "prompt_name": "query", "input_type": "query"}, "input_type", "not both"),
        ({"input": [1], "prompt_name": "query"}, "prompt_name", "leave out prompt_name"),
        ({"input": [1], "input_type": "query"}, "input_type", "leave out input_type"),
        ({"input": "a", "truncate_prompt_tokens": -2}, "truncate_prompt_tokens", ""),
        ({"input": "a", "truncate": "END"}, "truncate", "truncate_prompt_tokens"),
        ({"input": "a", "task": "retrieval.query"}, "task", "input_type"),
        ({"input": "a", "priority": 1}, "priority", "allow_priority"),
        ({"input": ["a"] * 2049}, "input", "max_texts"),
    ],
)
def test_what_is_refused_is_named(
    server: RunningServer, body: dict[str, Any], param: str, words: str
) -> None:
    error = refused(server, **body)
    assert error["param"].partition(".")[0] == param
    assert words in error["message"]


def test_texts_are_cut_as_asked(server: RunningServer) -> None:
    long = "abcdefgh"
    assert tokens(server, input=long, truncate_prompt_tokens=3) == [[97, 98, 99]]
    left = {"truncate_prompt_tokens": 3, "truncation_side": "left"}
    assert tokens(server, input=long, **left) == [[102, 103, 104]]
    assert tokens(server, input=[[1, 2, 3, 4]], truncate_prompt_tokens=3) == [[1, 2, 3]]
    assert tokens(server, input=[[1, 2, 3, 4]], **left) == [[2, 3, 4]]
    assert vectors(server, input="a" * 600, truncate_prompt_tokens=-1)[0][0] == 512
    assert vectors(server, input="a" * 600, truncate_prompt_tokens=700)[0][0] == 512
    assert vectors(server, input="ab", truncate_prompt_tokens=3)[0][0] == 2


def test_prompts_stand_before_texts(server: RunningServer) -> None:
    assert tokens(server, input="a", prompt_name="query") == [[*b"Q:a"]]
    assert tokens(server, input=["a", "b"], input_type="document") == [[*b"D:a"], [*b"D:b"]]
    assert tokens(server, input="a") == [[97]]


def test_cosines_of_a_model_of_vectors(server: RunningServer) -> None:
    answer = server.post("/v1/rerank", {"query": "a", "documents": ["b", {"text": "a"}, "zz"]})
    assert answer.status_code == 200, answer.text
    line = server.messages_to_worker("Embed")[-1]
    sent = [[int(n) for n in part.split("]")[0].split(", ")] for part in line.split("token_ids=[")[1:]]
    assert sent == [[*b"Q:a"], [*b"D:b"], [*b"D:a"], [*b"D:zz"]]
    results = answer.json()["results"]
    scores = [each["relevance_score"] for each in results]
    assert scores == sorted(scores, reverse=True)
    assert {each["index"]: each["document"]["text"] for each in results} == {0: "b", 1: "a", 2: "zz"}
    assert all(0.99 < score <= 1.000001 for score in scores)


def test_reranking(reranker: RunningServer) -> None:
    body = {"query": "q", "documents": ["b", "c", "a", "c"]}
    whole = reranker.post("/v1/rerank", body).json()
    assert [each["index"] for each in whole["results"]] == [1, 3, 0, 2]  # the first of equal ones comes first
    assert whole["results"][0]["relevance_score"] == pytest.approx((113 + 99) / 1000)
    assert whole["usage"] == {"prompt_tokens": 8, "total_tokens": 8}
    for path in ("/rerank", "/v2/rerank"):
        again = reranker.post(path, body).json()
        assert again["results"] == whole["results"]
    short = reranker.post("/v1/rerank", {**body, "top_n": 1, "return_documents": False}).json()
    assert [{**each} for each in short["results"]] == [
        {"index": 1, "relevance_score": whole["results"][0]["relevance_score"]}
    ]
    assert len(reranker.post("/v1/rerank", {**body, "top_n": 0}).json()["results"]) == 4
    for field, instead in (("texts", "documents"), ("top_k", "top_n"), ("max_tokens_per_doc", "truncate")):
        assert instead in refused(reranker, "/v1/rerank", **body, **{field: 1})["message"]
    assert "leave out instruction" in refused(reranker, "/v1/rerank", **body, instruction="x")["message"]


def test_scores(reranker: RunningServer) -> None:
    one = reranker.post("/v1/score", {"text_1": "a", "text_2": ["b", "c"]}).json()
    assert [each["score"] for each in one["data"]] == pytest.approx([0.195, 0.196])
    each = reranker.post("/score", {"text_1": ["a", "b"], "text_2": ["b", "c"]}).json()
    assert [pair["score"] for pair in each["data"]] == pytest.approx([0.195, 0.197])
    error = refused(reranker, "/v1/score", text_1=["a", "b"], text_2=["a"])
    assert error["param"] == "text_2"


def test_other_tasks_name_their_endpoint(
    server: RunningServer, reranker: RunningServer, start_server: StartServer
) -> None:
    chat = {"messages": [{"role": "user", "content": "x"}]}
    for path, body in (
        ("/v1/chat/completions", chat),
        ("/v1/completions", {"prompt": "x"}),
        ("/v1/responses", {"input": "x"}),
        ("/v1/responses/input_tokens", {"input": "x"}),
        ("/v1/messages", {**chat, "max_tokens": 1}),
        ("/v1/messages/count_tokens", chat),
    ):
        answer = server.post(path, body)
        assert answer.status_code == 400, path
        assert "use /v1/embeddings" in answer.text, path
    error = refused(reranker, input="x")
    assert (error["code"], error["param"]) == ("wrong_task", "model")
    assert "use /v1/rerank" in error["message"]


def test_a_model_that_writes_names_its_endpoint(shared_server: RunningServer) -> None:
    for path, body in (
        (EMBED, {"input": "x"}),
        ("/v1/rerank", {"query": "x", "documents": ["x"]}),
        ("/v1/score", {"text_1": "x", "text_2": "x"}),
    ):
        error = refused(shared_server, path, **body)
        assert error["code"] == "wrong_task"
        assert "use /v1/chat/completions" in error["message"]


def test_metrics_and_a_client_that_leaves(start_server: StartServer) -> None:
    with start_server("--task", "embed") as server:
        vectors(server, input=["ab", "c"])
        assert server.metric("truedraft_embedded_texts_total") == 2
        assert server.metric("truedraft_prompt_tokens_total") == 3
        assert server.metric("truedraft_request_success_total", finished_reason="stop") == 1
        server.worker.at_most(0)
        with server.unanswered(EMBED, {"input": "x"}):
            server.wait_for_messages("Embed", 2)
        server.wait_for_messages("Abort", 1)
        server.wait_until_idle()
        assert server.metric("truedraft_requests_aborted_total", reason="disconnect") == 1
        server.worker.go_on()
        assert len(vectors(server, input="y")) == 1


def test_a_request_counts_as_one_in_the_queue(start_server: StartServer) -> None:
    with start_server("--task", "embed", max_queued_sequences=2) as server:
        assert len(vectors(server, input=["a"] * 50)) == 50
        server.worker.at_most(0)
        with server.unanswered(EMBED, {"input": ["x"] * 9}), server.unanswered(EMBED, {"input": ["x"] * 9}):
            server.wait_for_requests(2)
            answer = server.post(EMBED, {"input": "x"})
            assert (answer.status_code, error_of(answer)["code"]) == (429, "queue_full")
            server.worker.go_on()


# Tokens of pairs and of what is cut are those of transformers' tokenizer.


@pytest.fixture(scope="module")
def paired(tmp_path_factory: pytest.TempPathFactory) -> tuple[Tokenizer, Any]:
    folder = tmp_path_factory.mktemp("paired")
    write_tokenizer(folder)
    from transformers import AutoTokenizer  # loads torch

    return load_tokenizer(str(folder)), AutoTokenizer.from_pretrained(folder)


@pytest.mark.parametrize("side", ["right", "left"])
def test_cutting_is_that_of_transformers(paired: tuple[Tokenizer, Any], side: str) -> None:
    ours, theirs = paired
    theirs.truncation_side = side
    letters = "abcdefghijklmnop"
    for first, second, most in product((0, 1, 4, 9), (None, 0, 1, 5, 9), (3, 4, 7, 8, 12, 30)):
        pair = letters[:first], None if second is None else letters[:second]
        asked = [pair[0] if second is None else pair]
        expected = theirs(asked, truncation=True, max_length=most, return_token_type_ids=True)
        ((ids, begin),) = ours.encode_pairs([pair], most, keeps_end=side == "left")
        assert [ids] == expected["input_ids"], (pair, most)
        (kinds,) = expected["token_type_ids"]
        assert begin == (kinds.index(1) if 1 in kinds else None)


def test_what_stands_around_a_text_must_fit(paired: tuple[Tokenizer, Any]) -> None:
    body = RerankRequest(model="m", query="q", documents=["d"], truncate_prompt_tokens=2)
    limits = PromptLimits(1000, 12, "The model reads 12 tokens", 200)
    reading = vector_texts.Reading(paired[0], EmbeddingFacts(1), limits, body)
    assert reading.encode([("abc", None)], "input")[0].token_ids == [2, 3]
    with pytest.raises(InvalidRequestError, match="already 3"):
        reading.encode([("a", "b")], "documents")


def test_special_tokens_can_be_left_out(paired: tuple[Tokenizer, Any]) -> None:
    ours, theirs = paired
    ((ids, _),) = ours.encode_pairs([("abc", None)], 2, add_special_tokens=False)
    assert ids == theirs("abc", add_special_tokens=False)["input_ids"][:2]


# Planted bugs.


def test_a_forgotten_prompt_is_seen(server: RunningServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(vector_texts, "prompt_of", lambda facts, name, kind: "")
    with pytest.raises(AssertionError):
        test_prompts_stand_before_texts(server)


def test_cutting_on_the_wrong_side_is_seen(
    server: RunningServer, paired: tuple[Tokenizer, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    right = Tokenizer.encode_pairs

    def wrong(self: Tokenizer, *args: Any, keeps_end: bool = False, **options: Any) -> Any:
        return right(self, *args, keeps_end=not keeps_end, **options)

    monkeypatch.setattr(Tokenizer, "encode_pairs", wrong)
    with pytest.raises(AssertionError):
        test_texts_are_cut_as_asked(server)
    with pytest.raises(AssertionError):
        test_cutting_is_that_of_transformers(paired, "right")


def test_pairs_of_a_model_that_is_asked_in_words(tmp_path: Path, paired: tuple[Tokenizer, Any]) -> None:
    facts = EmbeddingFacts(1, pair_template="<{instruction}|{query}|{document}>!", instruction="I")
    limits = PromptLimits(1000, 12, "The model reads 12 tokens", 200)
    body = RerankRequest(model="m", query="q", documents=["d"], truncate_prompt_tokens=-1)
    reading = vector_texts.Reading(paired[0], facts, limits, body)
    ids = [
        paired[1](text, add_special_tokens=False)["input_ids"]
        for text in ("<I|q|abcde>!", "<X|q|abcde>!", "<I|q|abcde>!")
    ]
    found = reading.asked(["q"] * 2, ["abcde", "abcdefghi"], None, "documents")
    assert [text.token_ids for text in found] == [ids[0], ids[2]]
    assert reading.asked(["q"], ["abcde"], "X", "documents")[0].token_ids == ids[1]
