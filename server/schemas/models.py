"""The answers of ``/v1/models``, and what is said to and of models that come and go."""

from typing import Literal

from pydantic import BaseModel, ConfigDict, Field

from truedraft.server.schemas.answer import is_none

# What clients of llama.cpp's router know a model's states by, where they have another word for one.
WORDS = {"ready": "loaded", "fetching": "downloading"}


class ModelStatus(BaseModel):
    """Says what a model is at."""

    value: str = Field(
        description="`unloaded`, `downloading`, `loading`, `loaded`, `restarting`, `unloading`, `sleeping` "
        "or `failed`."
    )
    reason: str | None = Field(None, exclude_if=is_none, description="Why not; absent when loaded.")
    bytes: int | None = Field(None, exclude_if=is_none, description="Fetched so far, while downloading.")
    total_bytes: int | None = Field(None, exclude_if=is_none, description="What there is to fetch.")
    stage: str | None = Field(None, exclude_if=is_none, description="What is being loaded.")


class ModelCard(BaseModel):
    id: str
    object: Literal["model"] = "model"
    created: int
    owned_by: str = "truedraft"
    root: str = Field(description="Hub id or folder name of the target, or of the LoRA adapter.")
    parent: str | None = Field(None, description="The model that a LoRA adapter is of; null for models.")
    max_model_len: int | None = Field(
        description="Tokens of prompt and output together; null until the model is loaded."
    )
    tool_form: str | None = Field(
        description="How the model writes tool calls: its family's way, or `generic` for a chat template "
        "without tools. Null without a chat template, and until the model is loaded."
    )
    status: ModelStatus | None = Field(
        None, exclude_if=is_none, description="What the model is at, where a server has several."
    )


class ModelList(BaseModel):
    object: Literal["list"] = "list"
    data: list[ModelCard]


class ModelCommand(BaseModel):
    """Names a model that is to be loaded or unloaded."""

    model_config = ConfigDict(extra="forbid")

    model: str = Field(description="A name that requests use.")


class LoadAdapter(BaseModel):
    """Names a LoRA adapter that is to be loaded."""

    model_config = ConfigDict(extra="forbid")

    lora_name: str = Field(description="The name by which requests will use it.")
    lora_path: str = Field(description="A folder on the server with PEFT's files.")
    load_inplace: bool = Field(False, description="Replace an adapter of that name.")
    base_model_name: str | None = Field(None, description="The model that it is of, where there are several.")


class UnloadAdapter(BaseModel):
    """Names a LoRA adapter that is to be unloaded."""

    model_config = ConfigDict(extra="forbid")

    lora_name: str


class Success(BaseModel):
    success: Literal[True] = True


class SleepStatus(BaseModel):
    is_sleeping: bool


class ModelEvent(BaseModel):
    """Says what a model has come to."""

    model: str
    status: ModelStatus
