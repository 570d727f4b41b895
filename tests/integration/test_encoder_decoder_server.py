"""A T5-shaped pair from folders, in a real server process: translation through ``/v1/completions``."""

import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
from openai import OpenAI
from transformers import AutoModelForSeq2SeqLM, AutoTokenizer

from tests.integration.conftest import DRAFTED, Server, serving
from tests.translation_pair import PREFIX, SENTENCES, save_pair
from truedraft.engine.commands.verify_trace import ReplaySettings
from truedraft.engine.commands.verify_trace import main as verify_trace

MODEL = "t5-toy"
NIETZSCHE = "He who fights with monsters must take care not to become a monster."

# The toy has not learned this one, so it has something to choose.
UNSEEN = "A dog reads the old garden, and friends."


@dataclass(frozen=True)
class Translator:
    server: Server
    target: str
    draft: str

    @property
    def openai(self) -> OpenAI:
        return self.server.openai

    def post(self, **body: Any) -> httpx.Response:
        return self.server.post("/v1/completions", {"model": MODEL, **body})


@pytest.fixture(scope="module")
def translator(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Translator]:
    folder: Path = tmp_path_factory.mktemp("translator")
    target, draft = save_pair(folder)
    with serving(folder, "--target", target, "--draft", draft, "--served-model-name", MODEL) as server:
        yield Translator(server, target, draft)


@pytest.fixture(scope="module")
def generated(translator: Translator) -> dict[str, str]:
    """What ``generate`` makes of each sentence, and whether the toy has learned anything."""
    tokenizer = AutoTokenizer.from_pretrained(translator.target)
    model = AutoModelForSeq2SeqLM.from_pretrained(translator.target, dtype=torch.float32)
    said = {}
    for english in SENTENCES:
        ids = tokenizer(PREFIX + english, return_tensors="pt").input_ids
        output = model.generate(ids, do_sample=False, max_new_tokens=60)
        said[english] = tokenizer.decode(output[0], skip_special_tokens=True)
    assert sum(said[english] == german for english, german in SENTENCES.items()) >= 8
    return said


def test_translation_call(translator: Translator, generated: dict[str, str]) -> None:
    """The call of the tutorials: English to the encoder, German from the decoders of both models."""
    completion = translator.openai.completions.create(
        model=MODEL, prompt=PREFIX + NIETZSCHE, max_tokens=60, temperature=0
    )
    assert completion.choices[0].text == generated[NIETZSCHE] == SENTENCES[NIETZSCHE]
    assert completion.choices[0].finish_reason == "stop"
    tokenizer = AutoTokenizer.from_pretrained(translator.target)
    prompt_ids = tokenizer(PREFIX + NIETZSCHE).input_ids
    assert prompt_ids[-1] == tokenizer.eos_token_id
    assert completion.usage is not None
    assert completion.usage.prompt_tokens == len(prompt_ids)
    written = tokenizer(SENTENCES[NIETZSCHE]).input_ids  # with its end
    assert completion.usage.completion_tokens == len(written)


def test_all_sentences_at_once_streamed(translator: Translator, generated: dict[str, str]) -> None:
    def stream(english: str) -> str:
        chunks = translator.openai.completions.create(
            model=MODEL,
            prompt=PREFIX + english,
            max_tokens=60,
            temperature=0,
            stream=True,
            extra_body={"speculation": DRAFTED},
        )
        return "".join(chunk.choices[0].text for chunk in chunks if chunk.choices)

    with ThreadPoolExecutor(len(SENTENCES)) as pool:
        assert list(pool.map(stream, SENTENCES)) == [generated[english] for english in SENTENCES]
    drafted = translator.server.metric("truedraft_spec_decode_num_draft_tokens_total")
    accepted = translator.server.metric("truedraft_spec_decode_num_accepted_tokens_total")
    assert 0 < accepted < drafted


@pytest.mark.parametrize("speculation", [{"method": "none"}, {"method": "ngram"}, {"method": "draft_model"}])
def test_with_a_seed_whoever_drafts(translator: Translator, speculation: dict[str, str]) -> None:
    request = {"prompt": PREFIX + UNSEEN, "max_tokens": 40, "temperature": 2.0, "seed": 7, "n": 4}
    answer = translator.post(**request, speculation=speculation).json()
    plain = translator.post(**request).json()
    texts = [choice["text"] for choice in answer["choices"]]
    assert texts == [choice["text"] for choice in plain["choices"]]
    assert len(set(texts)) > 1


def test_streams_begin_like_the_whole(translator: Translator) -> None:
    """Seeded and sampled, with log-probabilities: the chunks put together are the answer."""
    body = {"prompt": PREFIX + UNSEEN, "max_tokens": 40, "temperature": 2.0, "seed": 3, "logprobs": 2}
    whole = translator.post(**body).json()["choices"][0]
    text, tokens = "", []
    with translator.server.stream("/v1/completions", {"model": MODEL, **body}) as response:
        for line in response.iter_lines():
            if line.startswith("data: {"):
                choice = json.loads(line[6:])["choices"][0]
                text += choice["text"]
                tokens += (choice["logprobs"] or {"tokens": []})["tokens"]
                assert whole["text"].startswith(text)
    assert text == whole["text"]
    assert tokens == whole["logprobs"]["tokens"]


@pytest.mark.parametrize(
    ("fields", "status", "param", "words"),
    [
        ({"echo": True}, 400, "echo", "encoder reads the prompt"),
        ({"prompt_logprobs": 0}, 400, "prompt_logprobs", "encoder reads the prompt"),
        ({"prompt": [5] * 513}, 400, "prompt", "at most 512 tokens, but the prompt has 513"),
        ({"max_tokens": 512}, 400, "max_tokens", "at most 511 tokens, but 512"),
        ({"max_tokens": 511, "prompt": [5] * 512, "stop": ["e"]}, 200, None, ""),
    ],
)
def test_limits(
    translator: Translator, fields: dict[str, Any], status: int, param: str | None, words: str
) -> None:
    answer = translator.post(**{"prompt": "The house", "max_tokens": 4, "temperature": 0, **fields})
    assert answer.status_code == status, answer.text
    if status == 400:
        error = answer.json()["error"]
        assert error["param"] == param
        assert words in error["message"]


def test_no_chat_without_a_template(translator: Translator) -> None:
    body = {"model": MODEL, "messages": [{"role": "user", "content": "Hello"}]}
    answer = translator.server.post("/v1/chat/completions", body)
    assert answer.status_code == 400
    assert "no chat template" in answer.json()["error"]["message"]


@pytest.mark.parametrize("temperature", [0, 2.0])
def test_traces_can_be_verified(
    translator: Translator, tmp_path: Path, temperature: float, capsys: pytest.CaptureFixture[str]
) -> None:
    answer = translator.post(
        prompt=PREFIX + UNSEEN,
        max_tokens=40,
        temperature=temperature,
        seed=5,
        repetition_penalty=1.1,
        speculation={"trace": True, "verification": "rejection"},
        return_token_ids=True,
    )
    file = tmp_path / "answer.json"
    file.write_text(answer.text)
    code = verify_trace(ReplaySettings(file=file, target=translator.target, draft=translator.draft))
    printed = capsys.readouterr().out
    assert code == 0, printed
    assert "confirmed" in printed
