"""The base of objects inside requests: JSON as it is, and nothing that is not declared."""

from typing import Any

from pydantic import BaseModel, ConfigDict, model_validator


class StrictModel(BaseModel):
    """JSON as it is: no numbers in strings, no NaN, no unknown keys."""

    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)

    @model_validator(mode="before")
    @classmethod
    def _keep_one_unknown_key(cls, value: Any) -> Any:
        """One unknown key is enough for the error; pydantic would make an error of each of a million."""
        if not isinstance(value, dict):
            return value
        known = {field.alias or name for name, field in cls.model_fields.items()}
        unknown = [name for name in value if name not in known]
        shown = {*known, *unknown[:1]}
        return {name: item for name, item in value.items() if name in shown} if len(unknown) > 1 else value
