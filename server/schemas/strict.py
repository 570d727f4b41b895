"""The base of all objects of requests takes JSON as it is; ``unsupported_fields`` judges undeclared keys."""

from typing import Any

from pydantic import BaseModel, ConfigDict, Tag, model_validator


def _describe_null(schema: dict[str, Any]) -> None:
    """Let the API's description say that what may be absent may be null."""
    properties: dict[str, Any] = schema.get("properties", {})
    for name in properties.keys() - set(schema.get("required", [])):
        described = properties[name]
        if {"type": "null"} not in described.get("anyOf", []) and described.get("type") != "null":
            inner = {key: described.pop(key) for key in [*described] if key not in ("default", "description")}
            described["anyOf"] = [inner, {"type": "null"}] if inner else [{}]


class RequestPart(BaseModel):
    """It takes no numbers in strings and no NaN. A null counts as absent, declared or not."""

    model_config = ConfigDict(
        extra="allow", strict=True, allow_inf_nan=False, json_schema_extra=_describe_null
    )

    @model_validator(mode="before")
    @classmethod
    def _null_is_absent(cls, value: Any) -> Any:
        if not isinstance(value, dict) or None not in value.values():
            return value
        return {name: item for name, item in value.items() if item is not None}

    def declared(self, name: str) -> Any:
        """Returns the value of a field that some bodies have; None where this one does not declare it, even
        if the client sent something under that name."""
        return getattr(self, name) if name in type(self).model_fields else None


def tag(name: str) -> str:
    """Returns ``name`` as one of a union's alternatives, which no client's key is mistaken for in the path of
    an error."""
    return f"<{name}>"


def alternative(name: str) -> Tag:
    return Tag(tag(name))
