"""A scripted run on the fake runner: every step, every second and every end is known beforehand.

Four pages of four tokens, chunks of six, three rows. A launch takes a second, and reading a result
half of one. By hand, in tokens (S: one is sampled; -: preempted; .: waits):

    launch   1   2    3    4    5    6  |  7    8    9   10   11   12   13  | 14   15
    at       0   1   2.5   4   5.5   7  |  9   10  11.5  13  14.5  16  17.5 | 19.5 20.5
    result  2.5  4   5.5   7   8.5   9  | 11.5 13  14.5  16  17.5  19  19.5 | 22   22.5
    LONG     6  3 S  1 S  1 S  1 S  1 S |                                   |
    SHORT       2    1 S  1 S   -       | 5 S  1 S  1 S  1 S   .   1 S  1 S |
    BAD                                 |      2 S  1 S  1 S                |
    GONE                                |      1 S  1 S  1 S  1 S   -       | 5 S  1 S

LONG's token of 8.5 is EOS; SHORT's of 19.5 is its last; BAD's logits of 14.5 are not finite; GONE
is cancelled at 22; LATE waits from 10, and is late when somebody looks at 11.5.

SHORT loses its 4 computed tokens at 5.5 and GONE its 4 at 16: nothing is free then, and each is the
youngest. In launch 11 SHORT waits for BAD's page, which is still written. Launches 1, 7 and 14
have nothing to overlap with.
"""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Final, Literal

import pytest

from jaxserve.config import LogSection, MeasureSection
from jaxserve.engine import Engine, EngineState, Event, Stream
from jaxserve.engine.trace_ring import TraceRing
from jaxserve.errors import DeadlineError, InvalidRequestError, NumericsError
from jaxserve.metrics import Metrics
from jaxserve.plan import StepPlan
from tests.engines import LIMITS, Clock, ask, build_engine, check_accounts, check_idle
from tests.fakes import EOS_ID

LAUNCH_S: Final = 1.0
RESULT_S: Final = 0.5
PAGE_BYTES: Final = 400  # 100 bytes a token
LONG: Final = (1, 2, 3, 4, 5, 6, 7, 8, 9)
SHORT: Final = (21, 22, 23)
BAD: Final = (31, 32)
GONE: Final = (41,)
LATE: Final = (51, 52)
SNAPSHOT_STEP: Final = 9  # SHORT, BAD and GONE run, LATE waits
LEVELS: Final = (
    "requests_running", "requests_waiting", "waiting_tokens", "kv_usage_ratio",
    "kv_capacity_tokens", "kv_reserved_bytes", "kv_used_bytes", "kv_stranded_bytes",
    "tenant_requests_live",
)  # fmt: skip


def _say(prompt: tuple[int, ...], output_index: int) -> "int | Literal['not_finite'] | None":
    if prompt == LONG and output_index == 3:
        return EOS_ID
    if prompt == BAD and output_index == 1:
        return "not_finite"
    return 100 + output_index


@dataclasses.dataclass(slots=True, kw_only=True)
class Run:
    """What came of it.

    Attributes:
      levels: the gauges after step `SNAPSHOT_STEP`, while there is work.
      trace: where steps are kept.
    """

    metrics: Metrics
    trace: TraceRing | None
    levels: Mapping[str, float]


class Stage:
    """The engine, moved step by step in the test's own thread.

    Attributes:
      at_launch: called in the middle of each step.
    """

    def __init__(
        self, log: LogSection | None = None, measure: MeasureSection | None = None
    ) -> None:
        self.clock = Clock()
        self.clock.now_s = 0.0
        self.engine, _ = build_engine(
            script=_say,
            num_pages=1 + 4,
            max_model_tokens=16,
            step_limits=dataclasses.replace(LIMITS, max_seqs=3, max_rows=3),
            clock=self.clock,
            on_launch=self._pass_launch,
            on_result=self._pass_result,
            page_bytes=PAGE_BYTES,
            log=log,
            measure=measure,
        )
        self.engine._change_state(EngineState.SERVING)
        self.num_steps = 0
        self.at_launch: Callable[[], object] | None = None

    def _pass_launch(self, _: StepPlan) -> None:
        if self.at_launch:
            self.at_launch()
        self.clock.now_s += LAUNCH_S

    def _pass_result(self, _: StepPlan) -> None:
        self.clock.now_s += RESULT_S

    @property
    def has_work(self) -> bool:
        return not self.engine._loop.is_idle

    def step(self) -> None:
        self.num_steps += 1
        self.engine._loop.step()

    def close(self) -> None:
        self.engine.stop()
        check_idle(self.engine)
        check_accounts(self.engine)


def run_script(log: LogSection | None = None, measure: MeasureSection | None = None) -> Run:
    """Plays it to its end; all streams are read."""
    stage = Stage(log, measure)
    engine, levels = stage.engine, {}
    streams = {
        LONG: engine.submit(ask(LONG, max_tokens=7)),
        SHORT: engine.submit(ask(SHORT, max_tokens=8, ignore_eos=True)),
    }
    while stage.has_work:
        match stage.num_steps + 1:
            case 3:
                streams[BAD] = engine.submit(ask(BAD, max_tokens=4))
                _be_refused(engine)
            case 8:
                _read(streams[LONG])  # at 9
                streams[GONE] = engine.submit(ask(GONE, max_tokens=15))
            case 9:
                late = dataclasses.replace(ask(LATE), queue_timeout_s=1.0)
                streams[LATE] = engine.submit(late)
            case 18:
                streams[GONE].cancel()
        stage.step()
        if stage.num_steps == SNAPSHOT_STEP:
            levels = {name: engine.metrics.value(name) for name in LEVELS}
    for prompt in (SHORT, GONE):
        _read(streams[prompt])  # at 22.5
    with pytest.raises(NumericsError):
        _read(streams[BAD])
    with pytest.raises(DeadlineError):
        _read(streams[LATE])
    stage.close()
    return Run(metrics=engine.metrics, trace=engine.trace, levels=levels)


def _be_refused(engine: Engine) -> None:
    with pytest.raises(InvalidRequestError, match="999"):
        engine.submit(ask((999,)))


def _read(stream: Stream) -> list[Event]:
    return list(stream)
