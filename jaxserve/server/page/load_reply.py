"""The body of `/load`: levels and sums of the whole server, nothing of one request or tenant."""

from typing import Literal

import pydantic
from prometheus_client import Counter

import jaxserve
from jaxserve.engine import Engine, EngineState
from jaxserve.metrics import Metrics
from jaxserve.server.load import list_buckets, read_load

_Count = pydantic.NonNegativeInt
_Seconds = pydantic.NonNegativeFloat


class _Reply(pydantic.BaseModel):
    model_config = pydantic.ConfigDict(extra="forbid", strict=True)


class RequestsLoad(_Reply):
    """`finished` and `refused` are sums since the start, the others levels."""

    running: _Count
    waiting: _Count
    waiting_prompt_tokens: _Count
    max_running: _Count
    finished: _Count
    refused: _Count


class KVLoad(_Reply):
    """`usage` is the share of the pool's pages that are not free."""

    used_tokens: _Count
    total_tokens: _Count
    usage: float = pydantic.Field(ge=0, le=1)


class Totals(_Reply):
    """Since the start. `rows`: sums over the steps of the sequences whose tokens they computed."""

    prompt_tokens: _Count
    output_tokens: _Count
    steps: _Count
    rows: _Count
    preemptions: _Count


class Programs(_Reply):
    """`from_cache`: read from the cache's folder instead; `late`: compiled after the start."""

    compiled: _Count
    from_cache: _Count
    late: _Count


class DeviceTime(_Reply):
    """Seconds since the start; `gap`: without work though there were requests."""

    busy: _Seconds
    gap: _Seconds


class BucketLoad(_Reply):
    """A compiled program; tokens are 0 where they are not counted."""

    program: str
    shape: str
    steps: _Count
    real_tokens: _Count
    padded_tokens: _Count
    compile_s: _Seconds


class LoadReply(_Reply):
    """Of `/load`. Rates are differences of two replies by the difference of their `uptime_s`."""

    object: Literal["load"]
    status: Literal["starting", "serving", "draining", "stopped", "failed"]
    model: str | None
    version: str
    uptime_s: _Seconds
    requests: RequestsLoad
    kv: KVLoad
    totals: Totals
    programs: Programs
    phases_s: dict[str, _Seconds] = pydantic.Field(
        description="The engine thread's seconds since the start, by what it did."
    )
    device_s: DeviceTime
    buckets: list[BucketLoad]


def build_load_reply(metrics: Metrics, engine: Engine | None, *, uptime_s: float) -> LoadReply:
    """Returns what there is to see now.

    Args:
      engine: None while it is being loaded.
    """

    def count(name: str) -> int:
        return int(metrics.value(f"{name}_total"))

    load = read_load(metrics, engine)
    state = EngineState.STARTING if engine is None else engine.state
    return LoadReply(
        object="load",
        status=state.value,
        model=None if engine is None else engine.model.name,
        version=jaxserve.__version__,
        uptime_s=uptime_s,
        requests=RequestsLoad(
            running=load.running_requests,
            waiting=load.waiting_requests,
            waiting_prompt_tokens=load.waiting_prompt_tokens,
            max_running=load.max_running_requests,
            finished=load.finished_requests,
            refused=count("requests_refused"),
        ),
        kv=KVLoad(
            used_tokens=load.used_kv_tokens,
            total_tokens=load.total_kv_tokens,
            usage=load.kv_cache_usage,
        ),
        totals=Totals(
            prompt_tokens=count("prompt_tokens"),
            output_tokens=count("output_tokens"),
            steps=count("steps"),
            rows=count("useful_rows"),
            preemptions=count("preemptions"),
        ),
        programs=Programs(
            compiled=count("compiles"),
            from_cache=count("compile_cache_hits"),
            late=count("recompiles"),
        ),
        phases_s=_by_phase(metrics.step_host_seconds),
        device_s=DeviceTime(
            busy=metrics.value("step_device_seconds_total"),
            gap=metrics.value("step_gap_seconds_total"),
        ),
        buckets=[
            BucketLoad(
                program=use.program,
                shape=use.shape,
                steps=use.steps,
                real_tokens=use.real_tokens,
                padded_tokens=use.padded_tokens,
                compile_s=use.compile_s,
            )
            for use in list_buckets(metrics)
        ],
    )


def _by_phase(family: Counter) -> dict[str, float]:
    samples = [sample for part in family.collect() for sample in part.samples]
    return {s.labels["phase"]: s.value for s in samples if s.name.endswith("_total")}
