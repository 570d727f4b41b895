"""Request bodies for the OpenAPI page. A test sends each of them to the bundled pair."""

from fastapi.openapi.models import Example

from truedraft.server.entries import BUNDLED_MODEL_NAME

Examples = dict[str, Example]

MODEL = {"model": BUNDLED_MODEL_NAME}
STORY = [
    {"role": "system", "content": "You tell short stories."},
    {"role": "user", "content": "Tell me a story about a fox and a bird."},
]

COMPLETIONS: Examples = {
    "text": {
        "summary": "Continue a text",
        "value": MODEL | {"prompt": "Once upon a time", "max_tokens": 40, "temperature": 0.7},
    },
    "stream": {
        "summary": "As a stream, with the usage at its end",
        "value": MODEL
        | {
            "prompt": "Once upon a time",
            "max_tokens": 40,
            "stream": True,
            "stream_options": {"include_usage": True},
        },
    },
    "logprobs": {
        "summary": "Log-probabilities of a given text, nothing generated",
        "value": MODEL | {"prompt": "The cat sat on the mat.", "max_tokens": 0, "echo": True, "logprobs": 2},
    },
    "choices": {
        "summary": "Several prompts, several choices, a seed and stop strings",
        "value": MODEL
        | {
            "prompt": ["One day, a boy", "One day, a girl"],
            "n": 2,
            "max_tokens": 30,
            "seed": 7,
            "stop": ["\n", "."],
        },
    },
    "trace": {
        "summary": "How it speculates is up to the request; every round traced",
        "value": MODEL
        | {
            "prompt": "Once upon a time",
            "max_tokens": 20,
            "seed": 1,
            "speculation": {"method": "draft_model", "num_speculative_tokens": 6, "trace": True},
        },
    },
}

CHATS: Examples = {
    "chat": {"summary": "Answer a message", "value": MODEL | {"messages": STORY, "max_tokens": 60}},
    "stream": {
        "summary": "As a stream, with the usage at its end",
        "value": MODEL
        | {
            "messages": STORY,
            "max_tokens": 60,
            "stream": True,
            "stream_options": {"include_usage": True},
        },
    },
    "sampling": {
        "summary": "Sampling parameters, with log-probabilities",
        "value": MODEL
        | {
            "messages": STORY,
            "max_completion_tokens": 30,
            "temperature": 0.8,
            "top_p": 0.95,
            "min_p": 0.02,
            "frequency_penalty": 0.3,
            "seed": 3,
            "logprobs": True,
            "top_logprobs": 3,
        },
    },
    "plain": {
        "summary": "Without speculation",
        "value": MODEL
        | {"messages": STORY, "max_tokens": 30, "temperature": 0, "speculation": {"method": "none"}},
    },
}

RESPONSES: Examples = {
    "text": {
        "summary": "Answer a text",
        "value": MODEL
        | {
            "input": "Tell me a story about a dog.",
            "instructions": "You tell short stories.",
            "max_output_tokens": 60,
        },
    },
    "stream": {
        "summary": "As typed events",
        "value": MODEL | {"input": "Tell me a story about a dog.", "max_output_tokens": 60, "stream": True},
    },
    "conversation": {
        "summary": "Go on with a conversation, which the client keeps",
        "value": MODEL
        | {
            "input": [
                {"role": "user", "content": "Tell me a story about a dog."},
                {"role": "assistant", "content": [{"type": "output_text", "text": "There was a dog."}]},
                {"role": "user", "content": [{"type": "input_text", "text": "What did it do?"}]},
            ],
            "max_output_tokens": 40,
        },
    },
}

MESSAGES: Examples = {
    "text": {
        "summary": "Answer a message",
        "value": MODEL
        | {
            "system": "You tell short stories.",
            "messages": [{"role": "user", "content": "Tell me a story about a dog."}],
            "max_tokens": 60,
        },
    },
    "stream": {
        "summary": "As named events, which go on with what the assistant has begun to say",
        "value": MODEL
        | {
            "messages": [
                {"role": "user", "content": [{"type": "text", "text": "Tell me a story about a dog."}]},
                {"role": "assistant", "content": "Once there was"},
            ],
            "max_tokens": 40,
            "stop_sequences": ["The end"],
            "stream": True,
        },
    },
}

DECISIONS: Examples = {
    "questions": {
        "summary": "Three questions about a text",
        "value": MODEL
        | {
            "input": "The dog ran to the park. It saw a big red ball and was very happy.",
            "questions": [
                {"type": "predicate", "name": "animal", "instructions": "There is an animal in the story."},
                {
                    "type": "choice",
                    "name": "mood",
                    "instructions": "How does the dog feel?",
                    "choices": [{"value": "happy"}, {"value": "sad"}, {"value": "angry"}],
                },
                {
                    "type": "score",
                    "name": "length",
                    "instructions": "How long is the story?",
                    "levels": [{"label": "short"}, {"label": "long", "description": "over a page"}],
                },
            ],
        },
    },
}

TOKEN_COUNTS: Examples = {
    "messages": {
        "summary": "A conversation",
        "value": MODEL | {"messages": [{"role": "user", "content": "Tell me a story about a dog."}]},
    }
}

INFILL: Examples = {
    "gap": {
        "summary": "A gap in a text: 400 with a model that has no tokens for it",
        "value": MODEL | {"input_prefix": "def add(a, b):\n", "input_suffix": "\n", "n_predict": 8},
    }
}

SHOW: Examples = {"model": {"summary": "A model by its name", "value": {**MODEL}}}

TOKENIZE: Examples = {
    "prompt": {
        "summary": "A text",
        "value": MODEL | {"prompt": "Once upon a time", "return_token_strs": True},
    },
    "messages": {"summary": "A chat: as many tokens as it would use", "value": MODEL | {"messages": STORY}},
}

DETOKENIZE: Examples = {"tokens": {"summary": "Token ids", "value": MODEL | {"tokens": [72, 101, 108]}}}

TEXTS = ["The fox sleeps under a tree.", "Rain is expected tomorrow."]

EMBEDDINGS: Examples = {
    "texts": {"summary": "Vectors of two texts", "value": MODEL | {"input": TEXTS}},
    "base64": {
        "summary": "One vector in base64, of a text that is cut if it is too long",
        "value": MODEL | {"input": TEXTS[0], "encoding_format": "base64", "truncate_prompt_tokens": -1},
    },
}

RERANK: Examples = {
    "documents": {
        "summary": "The better one of two documents",
        "value": MODEL | {"query": "Where is the fox?", "documents": TEXTS, "top_n": 1},
    }
}

SCORE: Examples = {
    "pairs": {
        "summary": "A text paired with two others",
        "value": MODEL | {"text_1": "Where is the fox?", "text_2": TEXTS},
    }
}
