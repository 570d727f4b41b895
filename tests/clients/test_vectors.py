"""LangChain's and LlamaIndex's clients of vectors and scores get what the plain requests get."""

import asyncio
from collections.abc import Iterator

import pytest
from langchain_openai import OpenAIEmbeddings
from llama_index.core.schema import NodeWithScore, QueryBundle, TextNode
from llama_index.embeddings.openai_like import OpenAILikeEmbedding
from llama_index.postprocessor.jinaai_rerank import JinaRerank

from tests.clients.conftest import Server
from tests.integration.conftest import serving
from tests.vector_models import ENCODERS, write_model

MODEL = "encoder"
TEXTS = ["The fox sleeps.", "It rains.", "A dog, and a fox", ""]


@pytest.fixture(scope="module")
def encoder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    folder = tmp_path_factory.mktemp("encoder")
    write_model(folder / "model", *ENCODERS["bert"])
    arguments = "--target", str(folder / "model"), "--served-model-name", MODEL
    with serving(folder, *arguments) as running:
        yield running


@pytest.fixture(scope="module")
def expected(encoder: Server) -> list[list[float]]:
    """Returns the vectors through the plain SDK, whose bits are those of ``base64``."""
    answer = encoder.openai.embeddings.create(model=MODEL, input=TEXTS)
    vectors = [one.embedding for one in answer.data]
    assert len({tuple(vector) for vector in vectors}) == len(TEXTS)
    return vectors


def test_langchain_embeds(encoder: Server, expected: list[list[float]]) -> None:
    client = OpenAIEmbeddings(
        model=MODEL, base_url=f"{encoder.url}/v1", api_key="none", check_embedding_ctx_length=False
    )
    assert client.embed_documents(TEXTS) == expected
    assert client.embed_documents(TEXTS, chunk_size=1) == expected
    assert client.embed_query(TEXTS[0]) == expected[0]
    assert asyncio.run(client.aembed_documents(TEXTS)) == expected


def llama_index(server: Server) -> OpenAILikeEmbedding:
    return OpenAILikeEmbedding(
        model_name=MODEL, api_base=f"{server.url}/v1", api_key="none", embed_batch_size=3, max_retries=0
    )


def test_llama_index_embeds(encoder: Server, expected: list[list[float]]) -> None:
    # The client leaves out texts that are empty.
    client = llama_index(encoder)
    assert client.get_text_embedding_batch(TEXTS[:3]) == expected[:3]
    assert client.get_query_embedding(TEXTS[1]) == expected[1]
    assert asyncio.run(client.aget_text_embedding(TEXTS[2])) == expected[2]


def test_llama_index_reranks_in_the_form_of_jina(encoder: Server) -> None:
    body = {"model": MODEL, "query": "fox", "documents": TEXTS[:3], "top_n": 2}
    results = encoder.post("/v1/rerank", body).json()["results"]
    client = JinaRerank(top_n=2, model=MODEL, base_url=f"{encoder.url}/v1", api_key="none")
    nodes = [NodeWithScore(node=TextNode(text=text)) for text in TEXTS[:3]]
    found = client.postprocess_nodes(nodes, QueryBundle("fox"))
    assert [(one.node.get_content(), one.score) for one in found] == [
        (TEXTS[one["index"]], one["relevance_score"]) for one in results
    ]
    assert len(found) == 2
