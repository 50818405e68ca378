"""Numbers with their source: the leaves of a machine description. Units are in the names of the fields that hold them."""

from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field

Identifier = Annotated[str, Field(pattern=r"^[A-Za-z][A-Za-z0-9_.-]{0,63}$")]
MAX_IDENTIFIER = 64
Text = Annotated[str, Field(min_length=1, max_length=500)]
Count = Annotated[int, Field(ge=1, le=2**48)]
DType = Literal["f64", "f32", "tf32", "bf16", "f16", "f8", "i8", "f4"]

# Above every machine that exists by a factor of a thousand: a figure beyond is a slip of the unit.
MAX_RATE = 1e19
MAX_LATENCY_NS = 1e10


class Strict(BaseModel):
    """Nothing is converted, nothing unknown is passed over, nothing can be changed afterwards."""

    model_config = ConfigDict(strict=True, extra="forbid", frozen=True, allow_inf_nan=False)


class Rate(Strict):
    """A rate per second (bytes or operations, as the field says)."""

    value: float = Field(gt=0, le=MAX_RATE)
    source: Text


class Latency(Strict):
    """A time in nanoseconds."""

    value: float = Field(ge=0, le=MAX_LATENCY_NS)
    source: Text


class Size(Strict):
    """A number of bytes or of things."""

    value: Count
    source: Text
