"""The launch table: how attention's work is cut on devices where that was measured.

`kernels/paged_attention/launches.json` in the package; scripts/gpu_tune.py writes it. What it has
no entry of is cut by the formulas of `kernels/paged_attention/launch.py`.
"""

import importlib.resources
import json
from pathlib import Path
from typing import Annotated, Final, Literal, Self

import pydantic

from jaxserve.config import Config
from jaxserve.errors import ConfigError
from jaxserve.kernels.paged_attention.launch import MAX_ROWS, MIN_ROWS, SPLIT_LEN, Cut, Cuts
from jaxserve.model.config import ModelConfig
from jaxserve.runner.spec import DtypeName, KvDtypeName

PACKAGED: Final = Path(
    str(importlib.resources.files("jaxserve.kernels.paged_attention") / "launches.json")
)

CallKind = Literal["decode", "chunk"]
TunedImpl = Literal["triton", "mosaic"]
Count = Annotated[int, pydantic.Field(ge=1)]


def _check_power_of_two(size: int) -> int:
    if size & (size - 1):
        raise ValueError(f"{size} is no power of two")
    return size


PowerOfTwo = Annotated[Count, pydantic.AfterValidator(_check_power_of_two)]


class _Strict(pydantic.BaseModel):
    model_config = pydantic.ConfigDict(frozen=True, extra="forbid", strict=True)


class AttentionCall(_Strict):
    """What of a model decides how its attention is best cut: all that is the same in every step.

    Attributes:
      num_shared: query heads of a KV head.
    """

    impl: TunedImpl
    head_dim: Count
    num_shared: Count
    page_size: Count
    q_dtype: DtypeName
    kv_dtype: KvDtypeName

    @classmethod
    def of(
        cls,
        model: ModelConfig,
        config: Config,
        *,
        attention: TunedImpl,
        dtypes: tuple[DtypeName, KvDtypeName],
    ) -> Self:
        """Returns a model's call.

        Args:
          dtypes: of the weights and of the pool; queries have the wider one.
        """
        return cls(
            impl=attention,
            head_dim=model.head_dim,
            num_shared=model.num_heads // model.num_kv_heads,
            page_size=config.kv.page_size,
            q_dtype="float32" if "float32" in dtypes else "bfloat16",
            kv_dtype=dtypes[1],
        )


class Entry(AttentionCall):
    """One cut, and what was measured of it.

    Attributes:
      device: as JAX names it, such as "NVIDIA H200".
      rows, block_tokens, num_warps, num_stages, wanted_programs: as in `Cut`.
      time_ratio: over the formula's time; the geometric mean of what was measured.
      jax: the version that it was measured with.
    """

    device: Annotated[str, pydantic.Field(min_length=1)]
    kind: CallKind
    rows: Annotated[PowerOfTwo, pydantic.Field(ge=MIN_ROWS)]
    # a whole number of them is a split of one length
    block_tokens: Annotated[PowerOfTwo, pydantic.Field(ge=16, le=SPLIT_LEN)]
    num_warps: Annotated[PowerOfTwo, pydantic.Field(le=32)]
    num_stages: Count
    wanted_programs: Count
    time_ratio: Annotated[float, pydantic.Field(gt=0, lt=1)]
    jax: str

    @pydantic.model_validator(mode="after")
    def _check_mosaic(self) -> Self:
        if self.impl == "mosaic" and (self.rows, self.num_warps) != (MAX_ROWS, 4):
            raise ValueError(
                f"mosaic has {MAX_ROWS} rows and 4 warps, not {self.rows} and {self.num_warps}"
            )
        return self

    @property
    def cut(self) -> Cut:
        return Cut(
            rows=self.rows,
            block_tokens=self.block_tokens,
            num_warps=self.num_warps,
            num_stages=self.num_stages,
            wanted_programs=self.wanted_programs,
        )

    @property
    def place(self) -> tuple[object, ...]:
        """What no two entries share."""
        call = {name: getattr(self, name) for name in AttentionCall.model_fields}
        return (self.device, self.kind, *call.values())


class LaunchTable(_Strict):
    """All entries, at most one of each place."""

    version: Literal[1] = 1
    # a list is what JSON has
    entries: Annotated[tuple[Entry, ...], pydantic.Field(strict=False)] = ()

    @pydantic.model_validator(mode="after")
    def _check_places(self) -> Self:
        places = [entry.place for entry in self.entries]
        for place in places:
            if places.count(place) > 1:
                raise ValueError(f"two entries of {', '.join(map(str, place))}")
        return self

    def find_cuts(self, call: AttentionCall, *, device: str) -> Cuts:
        """Returns what the table has of a call; None in place of what it has not."""
        cuts = {
            entry.kind: entry.cut
            for entry in self.entries
            if entry.device == device and all(getattr(entry, name) == value for name, value in call)
        }
        return Cuts(**cuts)


def read_launch_table(path: Path = PACKAGED) -> LaunchTable:
    """Returns the table.

    Raises:
      ConfigError: it cannot be read, is no JSON, or has what it should not.
    """
    try:
        return LaunchTable.model_validate_json(path.read_bytes())
    except OSError as error:
        raise ConfigError(f"the launch table {path} cannot be read: {error.strerror}") from error
    except pydantic.ValidationError as error:
        first = error.errors(include_url=False)[0]
        place = ".".join(map(str, first["loc"]))
        raise ConfigError(
            f"the launch table {path} is wrong: {place + ': ' if place else ''}{first['msg']}; "
            "mend the entry, or take it out"
        ) from error


def write_launch_table(table: LaunchTable, path: Path) -> None:
    """Writes the table, its entries in order."""
    ordered = sorted(table.entries, key=lambda entry: tuple(map(str, entry.place)))
    fields = table.model_copy(update={"entries": tuple(ordered)}).model_dump(mode="json")
    path.write_text(json.dumps(fields, indent=1) + "\n", encoding="utf-8")
