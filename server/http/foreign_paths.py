"""Names what to use in the place of other servers' endpoints that do not exist here."""

from collections.abc import Mapping

GENERATE = "POST /v1/completions continues a text"
CHAT = "POST /v1/chat/completions answers messages"
AT_START = "models are named when the server is started: truedraft serve --target"
STATELESS = "nothing is stored here: send each request by itself"
TEXT = "this server reads and writes text only"

# Each path, with those below it, has a sentence on what is here.
INSTEAD: Mapping[str, str] = {
    "/api/chat": CHAT,
    "/api/generate": GENERATE,
    "/api/ps": "GET /v1/models lists what is loaded",
    "/api/pull": AT_START,
    "/api/push": AT_START,
    "/api/create": AT_START,
    "/api/copy": AT_START,
    "/api/delete": AT_START,
    "/api/v1/generate": GENERATE,
    "/api/v1/model": "GET /v1/models lists the names",
    "/apply-template": "POST /tokenize with messages gives the tokens of a chat",
    "/completion": GENERATE,
    "/generate": GENERATE,
    "/generate_stream": f"{GENERATE}, with stream: true",
    "/get_model_info": "GET /version describes the model",
    "/get_server_info": "GET /version describes the server",
    "/info": "GET /version describes the server",
    "/lora-adapters": "GET /v1/models lists adapters, and 'model' chooses one",
    "/server_info": "GET /version describes the server",
    "/slots": "GET /metrics tells what is running",
    "/v1/assistants": STATELESS,
    "/v1/audio/": TEXT,
    "/v1/batches": STATELESS,
    "/v1/engines": "GET /v1/models lists the names",
    "/v1/files": STATELESS,
    "/v1/images/": TEXT,
    "/v1/moderations": "POST /v1/decisions tells how probable answers to questions about a text are",
    "/v1/realtime": "POST /v1/chat/completions streams with stream: true",
    "/v1/systemone": "POST /v1/decisions tells how probable answers to questions about a text are",
    "/v1/threads": STATELESS,
    "/v1/vector_stores": STATELESS,
    "/v1/videos": TEXT,
}


def is_foreign(path: str) -> bool:
    """Tells whether another server has just this path."""
    return path.rstrip("/").lower() in INSTEAD


def instead_of(path: str) -> str | None:
    """Returns a sentence on what to use in the place of a path; None for one that no other server has."""
    path = path.rstrip("/").lower()
    for known, words in INSTEAD.items():
        if path == known.rstrip("/") or path.startswith(f"{known.rstrip('/')}/"):
            return f"{words}."
    return None
