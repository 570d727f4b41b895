"""Every setting of the server is declared here: HTTP's own, and by inheritance the engine's.

Flags, ``TRUEDRAFT_*`` environment, a YAML file and ``--help`` all come from the ``Settings`` declaration;
``server.cli.settings_sources`` reads them.
"""

from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ByteSize,
    Field,
    PrivateAttr,
    SecretStr,
    model_validator,
)
from pydantic_settings import (
    BaseSettings,
    NoDecode,
    SettingsConfigDict,
)

from truedraft.engine.config import BUNDLED_PAIR, EngineConfig, adapter_entry
from truedraft.server.entries import (
    ALL_RIGHTS,
    BUNDLED_MODEL_NAME,
    RIGHTS_OF_A_KEY,
    ModelEntry,
    Rights,
    model_entries,
    read_rights,
)

ENV_PREFIX = "TRUEDRAFT_"
DEFAULT_PREFIX = "truedraft_"
OnChangedWeights = Literal["restart", "stop"]


def _split_commas(value: object) -> object:
    """Let flags and environment give a list as ``a,b``; YAML gives real lists."""
    parts = [value] if isinstance(value, str) else value
    if not isinstance(parts, list):
        return value
    items = [item for part in parts for item in (part.split(",") if isinstance(part, str) else [part])]
    return [item.strip() if isinstance(item, str) else item for item in items]


def _check_keys(keys: list[SecretStr]) -> list[SecretStr]:
    """An empty key would let every client in, and headers hold ASCII only."""
    for key in keys:
        secret = key.get_secret_value()
        if not secret:
            raise ValueError(
                "one of the keys is empty; leave the setting out to serve without authentication"
            )
        if not secret.isascii() or not secret.isprintable():
            raise ValueError("a key may have printable ASCII characters only")
    return keys


class ServerSettings(BaseModel):
    """Server"""

    config: Path | None = Field(
        None, description="YAML file with any of these settings (keys written with underscores)."
    )
    uds: Path | None = Field(None, description="Unix domain socket to listen on instead of host and port.")
    root_path: str = Field(
        "",
        description="Path under which a proxy serves this server, such as /llm; the proxy may strip "
        "it or not.",
    )
    ssl_certfile: Path | None = Field(None, description="TLS certificate chain in PEM; with ssl_keyfile.")
    ssl_keyfile: Path | None = Field(None, description="TLS private key in PEM; with ssl_certfile.")
    host: str = Field("127.0.0.1", description="Address to listen on; 0.0.0.0 for all interfaces.")
    port: int = Field(8000, ge=0, le=65535, description="Port to listen on; 0 takes a free one.")
    served_model_name: str = Field(
        "",
        description="Name that requests use in 'model', or several, comma-separated. "
        "Default: the target's folder name or hub id.",
    )
    chat_template: Path | None = Field(
        None, description="Jinja chat template to use instead of the model's own, or where it has none."
    )
    drain_timeout: float = Field(
        30,
        ge=0,
        description="Seconds that running requests get to finish after a signal to stop; new ones get"
        " 503. A second signal stops the server at once.",
    )
    keep_alive_timeout: int = Field(
        120,
        ge=1,
        description="Seconds that a connection may be idle between two requests. Keep it longer than "
        "clients' and proxies' own timeouts, or some requests meet a closed connection.",
    )
    heartbeat_timeout: float = Field(
        30, gt=0, description="Seconds without a sign of life after which the worker is killed and replaced."
    )
    step_timeout: float = Field(
        600, gt=0, description="Seconds that one step may take before the worker is killed and replaced."
    )
    max_worker_restarts: int = Field(
        5,
        ge=0,
        description="Restarts in a row after which the server gives up and exits with an error. Only "
        "workers that served for less than a minute count.",
    )
    on_changed_weights: OnChangedWeights = Field(
        "restart",
        description="What follows when a file that is read while serving (a GGUF file's embeddings) is "
        "written over in place. restart: the worker says so and is replaced by one that loads the new file; "
        "system_fingerprint changes. stop: the server ends with an error.",
    )
    workers: int | None = Field(
        None,
        ge=1,
        description="Worker processes of this server, each with its own models and caches. They share"
        " num_threads, and those of one device its cache memory. Default: one, or one for"
        " each device.",
    )
    metrics_prefix: str = Field(
        DEFAULT_PREFIX,
        pattern=r"^[a-zA-Z_:][a-zA-Z0-9_:]*$",
        description="Prefix of metric names. With 'vllm:', dashboards and autoscalers made for vLLM work.",
    )
    log_level: Literal["debug", "info", "warning", "error"] = Field(
        "info", description="Least severe message that is logged; info includes one line per request."
    )
    log_format: Literal["text", "json"] = Field(
        "text", description="json: every line of the log is an object, with a request's figures as numbers."
    )
    loop_lag_warning: float = Field(
        1.0,
        ge=0.05,
        le=3600,
        description="Seconds that the event loop may be held up before a warning names the function that"
        " holds it. Another follows whenever that time has doubled.",
    )
    otel: bool = Field(
        False,
        description="Export traces of requests by OpenTelemetry to OTEL_EXPORTER_OTLP_ENDPOINT. "
        "Needs the extra 'otel'.",
    )


class SeveralSettings(BaseModel):
    """Several models"""

    models: Annotated[list[ModelEntry], NoDecode, BeforeValidator(model_entries)] = Field(
        [],
        description="Models of this server, comma-separated; requests choose one by 'model'. In a YAML file "
        "an entry may have name, target, draft, load (always or on_demand), chat_template, workers and any "
        "setting of the engine; what it leaves out is as for the server. Default: one model, target.",
    )
    max_loaded_models: int | None = Field(
        None,
        ge=1,
        description="Largest number of models in memory at one time. The least recently used one that no "
        "request uses makes room for another. Default: as many as fit into the machine's memory, or its "
        "container's.",
    )
    idle_unload: float | None = Field(
        None,
        gt=0,
        description="Seconds without a request after which a model is unloaded; the next request loads it "
        "again. Models with load: always stay. Default: never.",
    )
    load_timeout: float = Field(
        600,
        gt=0,
        description="Seconds that a request waits for its model to be loaded; it then gets 503, and the load "
        "goes on.",
    )


class AccessSettings(BaseModel):
    """Access"""

    api_keys: Annotated[
        list[SecretStr], NoDecode, BeforeValidator(_split_commas), AfterValidator(_check_keys)
    ] = Field(
        [], description="Bearer keys that may use the API, comma-separated. Default: no authentication."
    )
    api_key_file: Path | None = Field(
        None,
        description="File with further keys, one a line; empty lines and lines with # are skipped. After a "
        "key may stand models=NAME,NAME, the models that it may use, and operate, the right to load and "
        "unload models and to clear prefix caches. Keys of api_keys may use all models, but not that.",
    )
    allowed_hosts: Annotated[list[str], NoDecode, BeforeValidator(_split_commas)] = Field(
        [],
        description="Host names that requests may use, comma-separated. '*.example.com' allows all "
        "names below it, '*' any; addresses are always allowed. Default: localhost if the"
        " server listens on loopback without keys, else any.",
    )
    cors_origins: Annotated[list[str], NoDecode, BeforeValidator(_split_commas)] = Field(
        [], description="Web origins that may call the API from a browser, comma-separated. Default: none."
    )


class RequestSettings(BaseModel):
    """Requests and limits"""

    strict_fields: bool = Field(
        False,
        description="Refuse a request for anything that would be reported in x-truedraft-ignored or "
        "x-truedraft-adjusted: unknown fields, fields that ask for extra output, lengths "
        "beyond the context.",
    )
    clamp_max_tokens: bool = Field(
        True,
        description="Let chats and responses ask for more tokens than the context has left: they get "
        "what is left, and x-truedraft-adjusted reports it. If off, they get 400.",
    )
    max_stop_strings: int = Field(
        64, ge=4, description="Largest number of strings in 'stop'; a request with more gets 400."
    )
    max_stop_characters: int = Field(
        16384,
        ge=256,
        description="Largest number of characters of all strings in 'stop' together; more get 400.",
    )
    max_tools: int = Field(1024, ge=1, description="Largest number of tools of one request; more get 400.")
    max_metadata: int = Field(
        16384,
        ge=0,
        description="Largest number of characters in the 'metadata' of a response, which repeats it; more "
        "get 400.",
    )
    max_logprobs: int = Field(
        5,
        ge=5,
        description="Largest 'logprobs' of completions. Above 20, it also applies to chats and prompts.",
    )
    max_body_size: ByteSize = Field(
        ByteSize(8 << 20), description="Largest request body; a larger one gets 413."
    )
    max_held_bodies: ByteSize = Field(
        ByteSize(256 << 20),
        description="Largest size of the bodies of all open requests together; a request beyond it gets 429.",
    )
    work_memory: ByteSize = Field(
        ByteSize(1 << 30),
        ge=1 << 20,
        description="Estimated memory for reading bodies, applying templates, tokenizing and writing "
        "answers at one time. Requests beyond it wait for their turn, which is fair "
        "between API keys; one that needs more than most of it runs as the only large "
        "one.",
    )
    max_prompt_characters: int | None = Field(
        None,
        ge=1,
        description="Largest number of characters of one request's prompts; more get 413 before they "
        "are tokenized. Default: 8 for each token of the model's context, but 500,000 to "
        "4,000,000.",
    )
    max_questions: int = Field(
        400, ge=1, description="Largest number of questions of one request to /v1/decisions; more get 400."
    )
    max_labels: int = Field(
        4096, ge=1, description="Largest number of labels of all of these questions together; more get 400."
    )
    max_choices: int = Field(
        1024, ge=1, description="Largest number of choices (prompts times n) of one request; more get 400."
    )
    max_texts: int = Field(
        2048,
        ge=1,
        description="Largest number of texts of one request for vectors or scores; more get 400.",
    )
    max_answer_values: int = Field(
        1_000_000,
        ge=1,
        description="Largest number of values in one answer: tokens times what is reported of each, "
        "such as log-probabilities, ids, origins and a trace. A request for more gets "
        "400. For a stream, only the prompts' and the trace count.",
    )
    max_grammar_size: int = Field(
        1 << 18,
        ge=1,
        le=1 << 18,
        description="Largest number of characters of a structured output's schema or grammar; more get 400.",
    )
    grammar_timeout: float = Field(
        1, gt=0, description="Seconds of CPU time that compiling a grammar may take; a slower one gets 400."
    )
    grammar_memory: ByteSize = Field(
        ByteSize(1 << 30),
        ge=1 << 20,
        description="Memory that compiling a grammar may take; a larger one gets 400.",
    )
    max_image_pixels: int = Field(
        50_000_000,
        ge=1,
        description="Largest number of pixels of a picture, as it is sent; a larger one gets 400 unread.",
    )
    allowed_media_domains: Annotated[list[str], NoDecode, BeforeValidator(_split_commas)] = Field(
        [],
        description="Host names from which pictures may be fetched that requests name by a URL, "
        "comma-separated; addresses of private networks are never asked. Default: none, pictures come in "
        "'data:' URLs.",
    )
    max_logit_bias: int = Field(
        1024, ge=0, description="Largest number of entries in 'logit_bias'; more get 400."
    )
    max_queued_sequences: int = Field(
        256,
        ge=1,
        description="Largest number of sequences (prompts times n) that wait for their first token; "
        "more get 429. A request that finds nothing waiting is always taken.",
    )
    max_queued_tokens: int | None = Field(
        None,
        ge=1,
        description="Largest number of prompt tokens that wait for their first token; more get 429. A"
        " request that finds nothing waiting is always taken. Default: no limit.",
    )
    max_concurrent_per_key: int | None = Field(
        None,
        ge=1,
        description="Largest number of open requests of one API key; more get 429. Default: no limit.",
    )
    allow_priority: bool = Field(
        False, description="Honour 'priority' in requests. If off, a request that has one gets 400."
    )
    share_prefixes: bool = Field(
        False,
        description="Share the prefix cache between API keys. Timing and 'cached_tokens' then reveal "
        "what other keys have sent. If off, each key has its own.",
    )
    body_timeout: float = Field(
        60,
        gt=0,
        description="Seconds that a client may take to send a request's body; a slower one gets 408.",
    )
    send_timeout: int = Field(
        60,
        ge=1,
        description="Seconds after which a connection is closed if its client does not read what "
        "waits for it (Linux).",
    )
    request_timeout: float | None = Field(
        None,
        gt=0,
        description="Seconds until an unfinished request ends, with 504 or, in a stream, with an "
        "error event. Default: no limit.",
    )


class Settings(BaseSettings, EngineConfig, RequestSettings, AccessSettings, SeveralSettings, ServerSettings):
    """Settings of ``truedraft serve``."""

    _rights: list[Rights] = PrivateAttr(default_factory=list)  # each key has its own

    model_config = SettingsConfigDict(
        extra="forbid",
        env_prefix=ENV_PREFIX,
        cli_kebab_case=True,
        cli_implicit_flags=True,
        cli_avoid_json=True,
    )

    @model_validator(mode="after")
    def _read_key_file(self) -> Self:
        self._rights = [RIGHTS_OF_A_KEY for _ in self.api_keys]
        if self.api_key_file is not None:
            try:
                lines = self.api_key_file.expanduser().read_text(encoding="utf-8-sig").splitlines()
            except (OSError, UnicodeDecodeError) as error:
                raise ValueError(f"api_key_file: cannot read {self.api_key_file}: {error}") from None
            entries = [line.split() for line in lines if line.strip() and not line.lstrip().startswith("#")]
            if not entries:
                raise ValueError(f"api_key_file: {self.api_key_file} holds no key")
            try:
                self.api_keys = [*self.api_keys, *_check_keys([SecretStr(key) for key, *_ in entries])]
                self._rights += [read_rights(words) for _, *words in entries]
            except ValueError as error:
                raise ValueError(f"api_key_file: {self.api_key_file}: {error}") from None
        return self

    @model_validator(mode="after")
    def _check_transport(self) -> Self:
        if (self.ssl_certfile is None) != (self.ssl_keyfile is None):
            raise ValueError("ssl_certfile and ssl_keyfile must be set together")
        if self.root_path and (not self.root_path.startswith("/") or self.root_path.endswith("/")):
            raise ValueError("root_path must start with a slash and not end with one")
        return self

    @model_validator(mode="after")
    def _check_devices(self) -> Self:
        self.check_workers()
        return self

    def check_workers(self) -> None:
        """Refuses workers that do not fit the devices."""
        num_devices = len(self.devices)
        if len(set(self.devices)) < num_devices:
            raise ValueError("device names the same one twice; set workers to have several share it")
        if self.num_workers % num_devices:
            raise ValueError(
                f"workers is {self.num_workers}, which is not a multiple of the {num_devices} devices "
                "in device"
            )
        if self.kv_events_endpoint is not None and self.num_workers > 1:
            raise ValueError(
                f"kv_events_endpoint tells of one worker's cache, and workers is {self.num_workers}; start "
                "several servers with one worker each"
            )
        if self.device_map is not None and self.num_workers > 1:
            raise ValueError("device_map spreads one worker over all GPUs, so workers must be 1")

    @model_validator(mode="after")
    def _check_kv_events(self) -> Self:
        if self.kv_events_endpoint is not None and len(self.api_keys) > 1 and not self.share_prefixes:
            raise ValueError(
                "kv_events_endpoint tells of no text that belongs to one of several keys alone; set "
                "share_prefixes, or let each key have a server"
            )
        return self

    @model_validator(mode="before")
    @classmethod
    def _check_single(cls, values: Any) -> Any:
        """Refuses settings of one model next to ``models``."""
        given = values if isinstance(values, dict) and values.get("models") else {}
        for name in ("target", "draft", "served_model_name"):
            if given.get(name):
                raise ValueError(
                    f"{name} and models cannot both be given; write it in the entry of its model in models"
                )
        return values

    @model_validator(mode="after")
    def _name_the_model(self) -> Self:
        if self.models:
            self._check_models()
            self.served_model_name = self.of_models()[0].served_model_name
        elif not self.served_model_name:
            self.served_model_name = _default_model_name(str(self.target))
        for own in self.of_models():
            if same := sorted({*own.served_names} & {*own.adapter_names}):
                raise ValueError(f"lora_modules: {same[0]} is the model's own name; give the adapter another")
        return self

    def _check_models(self) -> None:
        models = self.of_models()
        names = [name for own in models for name in (*own.served_names, *own.adapter_names)]
        if twice := sorted({name for name in names if names.count(name) > 1}):
            raise ValueError(f"models: two have the name {twice[0]}; give each a name of its own")
        num_pinned = sum(entry.load == "always" for entry in self.models)
        most = self.max_loaded_models or len(self.models)
        if num_pinned > most or (num_pinned == most and num_pinned < len(self.models)):
            raise ValueError(
                f"max_loaded_models is {most}, and {num_pinned} models have load: always, which leaves no "
                "place for the others"
            )
        for rights in self._rights:
            if unknown := sorted((rights.models or frozenset()) - {*names}):
                raise ValueError(
                    f"api_key_file: there is no model {unknown[0]}; this server has {', '.join(names)}"
                )

    def of_models(self) -> list["Settings"]:
        """Returns the settings of each model: the server's, with its own."""
        if not self.models:
            return [self]
        shared: dict[str, Any] = {"models": []}
        if self.cache_memory is None and len(self.models) > 1:
            # Together they get what one model would get.
            most = min(len(self.models), self.max_loaded_models or len(self.models))
            shared["cache_memory_share"] = self._cache_share() / most
        found = []
        for entry in self.models:
            name = entry.name or _default_model_name(str(entry.target))
            own = self.model_copy(update=shared | entry.own_settings() | {"served_model_name": name})
            own.check_workers()
            found.append(own)
        return found

    def rights_of(self, key: str) -> Rights:
        """Returns the rights of a key by the name that ``server.http.auth`` gives it; empty without keys."""
        return self._rights[int(key.removeprefix("key-"))] if key else ALL_RIGHTS

    @property
    def served_names(self) -> list[str]:
        return [name.strip() for name in self.served_model_name.split(",")]

    @property
    def adapter_names(self) -> list[str]:
        """Returns the names of ``lora_modules``."""
        return [adapter_entry(entry)[0] for entry in self.lora_modules]

    @property
    def model_name(self) -> str:
        """Returns the first of the served names."""
        return self.served_names[0]

    @property
    def public_target(self) -> str:
        """Returns the target's hub id or folder name: its path is not shown to clients."""
        return public_name(str(self.target))

    @property
    def devices(self) -> list[str]:
        """``cuda:0,1`` are two."""
        names = [name.strip() for name in self.device.split(",")]
        kind = names[0].partition(":")[0]
        return [f"{kind}:{name}" if name.isdecimal() else name for name in names]

    @property
    def num_workers(self) -> int:
        return self.workers or len(self.devices)

    def worker_configs(self, located: EngineConfig | None = None) -> list[EngineConfig]:
        """Returns one config for each worker, with its device and its share of threads and memory.

        ``located`` has the models' paths where the settings have names.
        """
        num_sharing = self.num_workers // len(self.devices)
        share: dict[str, Any] = {}
        if self.num_threads:
            share["num_threads"] = max(1, self.num_threads // self.num_workers)
        if self.cache_memory is not None:
            share["cache_memory"] = ByteSize(self.cache_memory // num_sharing)
        elif num_sharing > 1:
            share["cache_memory_share"] = self._cache_share() / num_sharing
        devices = self.devices * num_sharing
        return [
            (located or self.engine_config()).model_copy(update=share | {"device": device})
            for device in devices
        ]

    def _cache_share(self) -> float:
        return self.cache_memory_share or (0.9 if self.device.startswith("cuda") else 0.25)

    def engine_config(self) -> EngineConfig:
        return EngineConfig.model_validate(self.model_dump(include=set(EngineConfig.model_fields)))


def _default_model_name(target: str) -> str:
    return BUNDLED_MODEL_NAME if Path(target).is_relative_to(BUNDLED_PAIR) else public_name(target)


def public_name(model: str) -> str:
    """Returns a hub id or a folder's name, without the path; bundled models' names begin with the pair's."""
    if Path(model).is_relative_to(BUNDLED_PAIR):
        return f"{BUNDLED_MODEL_NAME}/{Path(model).name}"
    return Path(model).resolve().name if Path(model).exists() or Path(model).is_absolute() else model
