"""What clients of Ollama and llama.cpp ask before their first request, in the shapes of those servers."""

from typing import Any

from pydantic import BaseModel, Field

from truedraft.server.schemas.strict import RequestPart


class OllamaVersion(BaseModel):
    version: str


class OllamaDetails(BaseModel):
    """``family`` is not known here."""

    parent_model: str = ""
    format: str
    family: str = ""
    families: list[str] = []
    parameter_size: str = ""
    quantization_level: str = Field(description="The type that most of the weights are kept in.")


class OllamaModel(BaseModel):
    name: str
    model: str
    modified_at: str = Field(description="When the server was started.")
    size: int = Field(description="Bytes of the weights in memory; 0 while they are not loaded.")
    digest: str = Field(description="The `system_fingerprint` of answers.")
    details: OllamaDetails


class OllamaTags(BaseModel):
    models: list[OllamaModel]


class ShowRequest(RequestPart):
    model: str | None = Field(None, description="The served name; may be left out.")
    name: str | None = Field(None, description="Ollama's older name of model.")
    verbose: bool | None = Field(None, description="Accepted: all that is known is told.")


class OllamaShow(BaseModel):
    modelfile: str = ""
    parameters: str = Field(description="What the model's makers recommend, a parameter a line.")
    template: str = Field(description="The chat template.")
    details: OllamaDetails
    model_info: dict[str, Any] = Field(description="`general.context_length`, in tokens.")
    capabilities: list[str] = Field(
        description="`completion`, `vision`, `tools`, `thinking`, `insert`, `embedding`."
    )
    modified_at: str


class PropsSettings(BaseModel):
    n_ctx: int
    params: dict[str, float] = Field(description="What the model's makers recommend.")


class Props(BaseModel):
    """It has the fields of llama.cpp's answer that mean something here."""

    default_generation_settings: PropsSettings
    total_slots: int = Field(description="Sequences that run at the same time.")
    model_alias: str
    model_path: str
    chat_template: str
    modalities: dict[str, bool]
    build_info: str
