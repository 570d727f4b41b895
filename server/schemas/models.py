"""The answers of ``/v1/models``."""

from typing import Literal

from pydantic import BaseModel, Field


class ModelCard(BaseModel):
    id: str
    object: Literal["model"] = "model"
    created: int
    owned_by: str = "truedraft"
    root: str = Field(description="The target's hub id or folder name.")
    parent: None = None
    max_model_len: int | None = Field(
        description="Tokens of prompt and output together; null until the model is loaded."
    )
    tool_form: str | None = Field(
        description="How the model writes tool calls: its family's way, or `generic` for a chat template "
        "without tools. Null without a chat template, and until the model is loaded."
    )


class ModelList(BaseModel):
    object: Literal["list"] = "list"
    data: list[ModelCard]
