"""Whole engines on a fake runner, small enough that everything happens in them quickly (E0)."""

import contextlib
import dataclasses
from collections.abc import Callable, Iterable, Iterator
from typing import Any, Final, Literal

from jaxserve.config import (
    Config,
    KVSection,
    LimitsSection,
    LogSection,
    MeasureSection,
    PrefixCacheSection,
    RunnerSection,
    SchedulerSection,
)
from jaxserve.engine import (
    ChoiceFinished,
    Delta,
    Engine,
    EngineState,
    Event,
    Finished,
    ServedModel,
    Started,
)
from jaxserve.metrics import Metrics
from jaxserve.plan import StepLimits, StepPlan, TokenLogprobs
from jaxserve.request import FinishReason, GenerationRequest, SamplingParams
from tests.fakes import EOS_ID, VOCAB_SIZE, FakeRunner, Script, build_byte_tokenizer

PAGE_SIZE: Final = 4
NUM_PAGES: Final = 13  # 12 usable: 48 tokens
MAX_MODEL_TOKENS: Final = 40
LIMITS: Final = StepLimits(max_rows=4, max_chunk_tokens=6, chunk_tile=2, max_chunks=2, max_seqs=4)

NO_CACHE: Final = PrefixCacheSection(enabled=False)  # where the same is asked twice
ONE_ROW: Final = dataclasses.replace(LIMITS, max_rows=1, max_seqs=1)


class Clock:
    """Time that stands still until a test moves it."""

    def __init__(self) -> None:
        self.now_s = 1000.0

    def __call__(self) -> float:
        return self.now_s


def build_engine(
    *,
    script: Script | None = None,
    bounds: LimitsSection | None = None,
    scheduler: SchedulerSection | None = None,
    step_limits: StepLimits = LIMITS,
    num_pages: int = NUM_PAGES,
    max_model_tokens: int = MAX_MODEL_TOKENS,
    overlap: bool = True,
    clock: Callable[[], float] | None = None,
    on_launch: Callable[[StepPlan], None] | None = None,
    on_result: Callable[[StepPlan], None] | None = None,
    chat_template: str | None = None,
    metrics: Metrics | None = None,
    log: LogSection | None = None,
    measure: MeasureSection | None = None,
    page_bytes: int = 0,
    reserve: Literal["on_demand", "max_length"] = "on_demand",
    prefix_cache: PrefixCacheSection | None = None,
) -> tuple[Engine, FakeRunner]:
    """Returns an engine that is not started yet, and its runner."""
    runner = FakeRunner(
        limits=step_limits,
        num_pages=num_pages,
        page_size=PAGE_SIZE,
        script=script,
        late_writes=True,
        on_launch=on_launch,
        on_result=on_result,
    )
    config = Config(
        kv=KVSection(page_size=PAGE_SIZE, reserve=reserve),
        prefix_cache=prefix_cache or PrefixCacheSection(),
        scheduler=scheduler or SchedulerSection(max_seqs=step_limits.max_seqs),
        runner=RunnerSection(overlap=overlap),
        limits=bounds or LimitsSection(),
        log=log or LogSection(),
        measure=measure or MeasureSection(),
    )
    model = ServedModel(
        name="bytes",
        max_model_tokens=max_model_tokens,
        vocab_size=VOCAB_SIZE,
        eos_ids=frozenset({EOS_ID}),
        has_chat_template=chat_template is not None,
    )
    engine = Engine(
        runner=runner,
        tokenizer=build_byte_tokenizer(chat_template=chat_template),
        config=config,
        model=model,
        metrics=metrics or Metrics(),
        page_bytes=page_bytes,
        clock=clock or Clock(),
    )
    return engine, runner


@contextlib.contextmanager
def serve(engine: Engine, runner: FakeRunner) -> Iterator[Engine]:
    """Starts the engine, stops it at the end, and then counts everything it owned."""
    engine.start()
    try:
        yield engine
    finally:
        runner.gate.set()
        engine.stop()
    if engine.state is EngineState.STOPPED:
        check_idle(engine)
    check_accounts(engine)


def check_idle(engine: Engine) -> None:
    """K1: no page, row or sequence is held by anybody."""
    scheduler, pool = engine._scheduler, engine._pool
    scheduler.check()
    assert not scheduler.has_unfinished
    assert (pool.num_held, pool.num_pending, pool.num_free) == (0, 0, pool.num_usable)
    assert engine._loop._by_sequence == {}
    assert not engine._loop._in_flight


def check_accounts(engine: Engine) -> None:
    """K5: every accepted request has ended, once, and nobody is counted in the queue."""
    submitted = engine.metrics.value("requests_submitted_total")
    assert engine.metrics.total("requests_finished_total") == submitted
    intake = engine._intake
    queue = intake._queue
    assert (queue.num_requests, queue.num_tokens, len(intake.live())) == (0, 0, 0)


@dataclasses.dataclass(slots=True, kw_only=True)
class Output:
    """A stream read to its end."""

    started: Started
    text: str
    token_ids: list[int]
    finished: Finished
    deltas: list[Delta]


def gather(events: Iterable[Event]) -> Output:
    """Reads a stream that ends without an error, and checks its order (K3)."""
    started, *deltas, finished = list(events)
    assert isinstance(started, Started)
    assert isinstance(finished, Finished)
    output = Output(started=started, text="", token_ids=[], finished=finished, deltas=[])
    for delta in deltas:
        assert isinstance(delta, Delta)
        output.text += delta.text
        output.token_ids += delta.token_ids
        output.deltas.append(delta)
    return output


@dataclasses.dataclass(slots=True, kw_only=True)
class ChoiceOutput:
    """One choice of a stream that was read to its end."""

    text: str = ""
    token_ids: list[int] = dataclasses.field(default_factory=list)
    logprobs: list[TokenLogprobs] = dataclasses.field(default_factory=list)
    end: ChoiceFinished | Finished | None = None

    @property
    def reason(self) -> FinishReason:
        assert self.end is not None, "it has no end"
        return self.end.reason


@dataclasses.dataclass(slots=True, kw_only=True)
class Outputs:
    """A stream of several choices, read to its end."""

    started: Started
    choices: list[ChoiceOutput]
    finished: Finished

    @property
    def token_ids(self) -> list[list[int]]:
        return [choice.token_ids for choice in self.choices]


def gather_choices(events: Iterable[Event]) -> Outputs:
    """Reads a stream that ends without an error, and checks its order (K3): each choice ends once
    and is silent then, and the last end is the request's."""
    started, *rest = list(events)
    assert isinstance(started, Started)
    choices: dict[int, ChoiceOutput] = {}
    for event in rest:
        assert not isinstance(event, Started)
        choice = choices.setdefault(event.index, ChoiceOutput())
        assert choice.end is None, f"{event} comes after choice {event.index}'s end"
        if isinstance(event, Delta):
            choice.text += event.text
            choice.token_ids += event.token_ids
            choice.logprobs += event.logprobs
            if event.logprobs:
                assert [entry.token_id for entry in event.logprobs] == list(event.token_ids)
        else:
            choice.end = event
    finished = rest[-1]
    assert isinstance(finished, Finished)
    assert sorted(choices) == list(range(len(choices)))
    assert all(choice.end is not None for choice in choices.values())
    num_tokens = sum(len(choice.token_ids) for choice in choices.values())
    assert finished.usage.completion_tokens == num_tokens
    ordered = [choices[index] for index in range(len(choices))]
    return Outputs(started=started, choices=ordered, finished=finished)


def ask(
    prompt: str | tuple[int, ...],
    *,
    id: str = "",
    **sampling: Any,  # noqa: ANN401  # wrong types too
) -> GenerationRequest:
    """Returns a greedy request for up to 8 tokens, unless told otherwise."""
    params = {"temperature": 0.0, "max_tokens": 8, **sampling}
    return GenerationRequest(prompt=prompt, id=id, sampling=SamplingParams(**params))
