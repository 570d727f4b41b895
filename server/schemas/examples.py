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

TOKEN_COUNTS: Examples = {
    "messages": {
        "summary": "A conversation",
        "value": MODEL | {"messages": [{"role": "user", "content": "Tell me a story about a dog."}]},
    }
}

TOKENIZE: Examples = {
    "prompt": {
        "summary": "A text",
        "value": MODEL | {"prompt": "Once upon a time", "return_token_strs": True},
    },
    "messages": {"summary": "A chat: as many tokens as it would use", "value": MODEL | {"messages": STORY}},
}

DETOKENIZE: Examples = {"tokens": {"summary": "Token ids", "value": MODEL | {"tokens": [72, 101, 108]}}}
