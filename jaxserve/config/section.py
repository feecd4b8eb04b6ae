"""What every section of the configuration is."""

import pydantic

GIB = 1 << 30
MIB = 1 << 20


class Section(pydantic.BaseModel):
    """A table of the file: frozen, finite, and an unknown key is an error."""

    model_config = pydantic.ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    @pydantic.field_validator("*", mode="before")
    @classmethod
    def _refuse_truth_values(cls, value: object, info: pydantic.ValidationInfo) -> object:
        """pydantic reads true as 1, and so would `port = true`."""
        field = cls.model_fields[info.field_name or ""]
        if isinstance(value, bool) and field.annotation is not bool:
            raise ValueError("true and false are no value of this key")
        return value
