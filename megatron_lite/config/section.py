"""The base of every configuration section: frozen, strict, unknown keys refused."""

from pydantic import BaseModel, ConfigDict


class Section(BaseModel):
    """One table of a recipe. Values are never coerced ("4096" is not 4096) and never change after loading."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False, protected_namespaces=())
