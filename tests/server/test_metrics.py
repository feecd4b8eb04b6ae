"""What the server counts equals what its clients counted, whatever they do (K5)."""

import asyncio
import collections
import contextlib
import dataclasses
import logging
import random
import re
import typing
from collections.abc import AsyncIterator, Callable
from typing import Any

import grpc
import pytest

from jaxserve.client import AsyncClient, Delta, Finish, ServerError
from jaxserve.errors import DeadlineError
from jaxserve.metrics import Metrics
from jaxserve.server.edge import Context, Edge
from tests.server.harness import Running, Steps, connect, run_server, until

pytestmark = pytest.mark.asyncio

NUM_ROUNDS = 3
NOT_FINITE_AT = 2  # output index
FIRST_STEPS = 6  # give the first two in line a token each, and do not end them
LEVELS = (
    "requests_running", "requests_waiting", "waiting_tokens", "kv_usage_ratio",
    "kv_reserved_bytes", "kv_used_bytes", "kv_stranded_bytes",
)  # fmt: skip


def letters(prompt: tuple[int, ...], output_index: int) -> int | str:
    if prompt[0] == ord("N") and output_index == NOT_FINITE_AT:
        return "not_finite"
    return ord("a") + output_index % 26


@dataclasses.dataclass(slots=True)
class Tally:
    """What the clients saw."""

    finished: collections.Counter[str] = dataclasses.field(default_factory=collections.Counter)
    refused: collections.Counter[str] = dataclasses.field(default_factory=collections.Counter)
    codes: collections.Counter[tuple[str, str]] = dataclasses.field(
        default_factory=collections.Counter
    )
    prompt_tokens: int = 0
    output_tokens: int = 0  # of calls that were read to their end
    given_up_tokens: int = 0  # of the others, as far as they were read
    num_given_up: int = 0


class Crowd:
    """Clients of all kinds, a round at a time."""

    def __init__(self, running: Running, steps: Steps, rng: random.Random) -> None:
        self.running = running
        self.steps = steps
        self.rng = rng
        self.tally = Tally()

    def prompt(self, first: str = "x") -> str:
        return first + "p" * self.rng.randint(0, 8)

    async def play(self, client: AsyncClient) -> None:
        """Two calls are given up while they run; the others come to their own ends."""
        calls = [GivenUp(client, self, is_by_hanging_up=is_second) for is_second in (False, True)]
        wanted = self.running.num_submitted + len(calls)
        firsts = [asyncio.create_task(call.read_first()) for call in calls]
        await until(lambda: self.running.num_submitted == wanted)  # they are the first in line
        others = [
            asyncio.create_task(self.read_whole(client)),
            asyncio.create_task(self.read_whole(client)),
            asyncio.create_task(self.generate(client)),
            asyncio.create_task(self.read_not_finite(client)),
            asyncio.create_task(self.be_refused(client, "invalid_field", temperature=-1.0)),
            asyncio.create_task(self.be_refused(client, "model_not_found", model="none")),
            asyncio.create_task(self.be_refused(client, "invalid_field", request_id="\n")),
        ]
        self.steps.allow(FIRST_STEPS)
        await asyncio.gather(*firsts)
        for call in calls:
            await call.close()
        num_given_up = self.tally.num_given_up = self.tally.num_given_up + len(calls)
        self.tally.finished["cancelled"] = num_given_up
        await until(lambda: len(self.running.aborts) >= num_given_up)
        await self.step_until(lambda: all(task.done() for task in others))
        await asyncio.gather(*others)
        await self.step_until(lambda: self.running.finished("cancelled") == num_given_up)

    async def step_until(self, condition: Callable[[], bool]) -> None:
        while not condition():
            self.steps.allow(1)
            await asyncio.sleep(0.001)

    async def read_whole(self, client: AsyncClient) -> None:
        num_tokens, max_tokens = 0, self.rng.randint(12, 24)
        async for event in client.stream(self.prompt(), max_tokens=max_tokens):
            if isinstance(event, Delta):
                num_tokens += len(event.text)  # a letter each
            elif isinstance(event, Finish):
                assert event.usage is not None
                assert event.usage.completion_tokens == num_tokens
                self.count("StreamGenerate", event.reason.value, event.usage)

    async def generate(self, client: AsyncClient) -> None:
        done = await client.generate(self.prompt(), max_tokens=self.rng.randint(12, 24))
        assert len(done.text) == done.usage.completion_tokens
        self.count("Generate", done.finish_reason.value, done.usage)

    def count(self, method: str, reason: str, usage: Any) -> None:  # noqa: ANN401  # two clients'
        self.tally.codes[method, "OK"] += 1
        self.tally.finished[reason] += 1
        self.tally.prompt_tokens += usage.prompt_tokens
        self.tally.output_tokens += usage.completion_tokens

    async def read_not_finite(self, client: AsyncClient) -> None:
        prompt, num_tokens = self.prompt("N"), 0
        reason = ""
        try:
            async for event in client.stream(prompt, max_tokens=9):
                num_tokens += len(event.text) if isinstance(event, Delta) else 0
        except ServerError as error:
            reason = error.reason
        assert (reason, num_tokens) == ("NUMERICS", NOT_FINITE_AT)
        self.tally.codes["StreamGenerate", "INTERNAL"] += 1
        self.tally.finished["error_numerics"] += 1
        self.tally.prompt_tokens += len(prompt)
        self.tally.output_tokens += num_tokens

    async def be_refused(self, client: AsyncClient, reason: str, **options: Any) -> None:  # noqa: ANN401
        with pytest.raises(ServerError) as caught:
            await client.generate(self.prompt(), **options)
        assert caught.value.reason.lower() == reason
        self.tally.refused[reason] += 1
        self.tally.codes["Generate", caught.value.code.name] += 1


class GivenUp:
    """A stream that is left after its first token: by a cancel, or by a connection that closes."""

    def __init__(self, client: AsyncClient, crowd: Crowd, *, is_by_hanging_up: bool) -> None:
        self._crowd = crowd
        self._own = AsyncClient(crowd.running.target) if is_by_hanging_up else None
        self._prompt = crowd.prompt()
        self._events = (self._own or client).stream(self._prompt, max_tokens=30)

    async def read_first(self) -> None:
        async for event in self._events:
            if isinstance(event, Delta):
                tally = self._crowd.tally
                tally.given_up_tokens += len(event.text)
                tally.prompt_tokens += len(self._prompt)
                tally.codes["StreamGenerate", "CANCELLED"] += 1
                return

    async def close(self) -> None:
        if self._own is not None:
            await self._own.close()
        with contextlib.suppress(ServerError, asyncio.CancelledError):
            await self._events.aclose()


class Watch:
    """Looks at every sample again and again: no counter may fall, nothing may be negative."""

    def __init__(self, metrics: Metrics) -> None:
        self._metrics = metrics
        self._before: dict[tuple[str, tuple[tuple[str, str], ...]], float] = {}
        self.num_looks = 0

    def look(self) -> None:
        self.num_looks += 1
        for family in self._metrics.registry.collect():
            for sample in family.samples:
                assert sample.value >= 0, sample
                if family.type == "gauge":
                    continue
                key = (sample.name, tuple(sample.labels.items()))
                assert sample.value >= self._before.get(key, 0), f"{sample} fell"
                self._before[key] = sample.value

    async def run(self) -> None:
        while True:
            self.look()
            await asyncio.sleep(0.001)


@contextlib.asynccontextmanager
async def watching(metrics: Metrics) -> AsyncIterator[Watch]:
    watch = Watch(metrics)
    task = asyncio.create_task(watch.run())
    try:
        yield watch
    finally:
        watch.look()
        task.cancel()
        (result,) = await asyncio.gather(task, return_exceptions=True)
    assert isinstance(result, asyncio.CancelledError), result


def by_label(metrics: Metrics, name: str) -> dict[str, float]:
    """The samples of a counter with one label that are not 0."""
    return {
        value: sample.value
        for family in metrics.registry.collect()
        for sample in family.samples
        if sample.name == f"jaxserve_{name}"
        for value in sample.labels.values()
        if sample.value
    }


async def play(seed: int) -> tuple[Metrics, Tally]:
    steps = Steps()
    async with run_server(steps, script=letters, num_pages=1 + 10) as running:
        crowd = Crowd(running, steps, random.Random(seed))
        async with watching(running.engine.metrics) as watch, connect(running) as client:
            for _ in range(NUM_ROUNDS):
                await crowd.play(client)
        assert watch.num_looks > 10
    return running.engine.metrics, crowd.tally


@pytest.mark.parametrize("seed", range(3))
async def test_counters_equal_what_the_clients_counted(seed: int) -> None:
    metrics, tally = await play(seed)
    assert by_label(metrics, "requests_finished_total") == dict(tally.finished)
    assert by_label(metrics, "requests_refused_total") == dict(tally.refused)
    assert metrics.value("requests_submitted_total") == tally.finished.total()
    assert {
        key: metrics.value("rpcs_total", method=key[0], code=key[1]) for key in tally.codes
    } == (dict(tally.codes))
    assert metrics.value("rpcs_total") == tally.codes.total()
    assert metrics.value("prompt_tokens_total") == tally.prompt_tokens
    output_tokens = metrics.value("output_tokens_total")
    least = tally.output_tokens + tally.given_up_tokens
    assert least <= output_tokens < least + (FIRST_STEPS + 2) * tally.num_given_up
    assert least <= metrics.value("delivery_seconds_count") <= output_tokens
    assert metrics.value("preemptions_total") > 0


async def test_the_logs_lines_add_up_to_the_counters(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "jaxserve.engine.accounts"):
        metrics, tally = await play(5)
    lines = [
        dict(re.findall(r"(\w+)=(\S+)", record.getMessage()))
        for record in caplog.records
        if record.getMessage().startswith("finished")
    ]
    assert collections.Counter(line["reason"] for line in lines) == tally.finished
    whole = [line for line in lines if line["reason"] != "cancelled"]
    assert sum(int(line["output_tokens"]) for line in whole) == tally.output_tokens
    for counter in ("output_tokens", "preemptions", "prompt_tokens"):
        assert sum(int(line[counter]) for line in lines) == metrics.value(f"{counter}_total")


@pytest.mark.parametrize("seed", [3])
async def test_the_sums_agree_with_each_other(seed: int) -> None:
    metrics, _ = await play(seed)
    value = metrics.value
    submitted, output_tokens = value("requests_submitted_total"), value("output_tokens_total")
    assert value("request_seconds_count") == submitted
    assert value("request_output_tokens_sum") == output_tokens
    assert value("request_prompt_tokens_sum") == value("prompt_tokens_total")
    started = value("time_to_first_token_seconds_count")
    assert started == submitted  # all have had a token
    for phase in ("queue", "prefill", "decode", "inference"):
        assert value(f"{phase}_seconds_count") == started, phase
    assert value("inter_token_seconds_count") == output_tokens - started
    assert value("offered_rows_total") - value("useful_rows_total") >= value("surplus_tokens_total")
    for name in LEVELS:
        assert value(name) == 0, name


@pytest.mark.parametrize("seed", [4])
async def test_every_token_computed_is_accounted_for(seed: int) -> None:
    """A request of p + n tokens computes p + n - 1: its last is never fed back."""
    metrics, tally = await play(seed)
    value = metrics.value
    assert value("recomputed_tokens_total") > 0
    assert value("prefix_cache_hit_tokens_total") > 0
    assert value("step_tokens_sum") == (
        value("prompt_tokens_total")
        + value("output_tokens_total")
        - value("time_to_first_token_seconds_count")
        - value("prefix_cache_hit_tokens_total")
        + value("recomputed_tokens_total")
        + value("surplus_tokens_total")
        + tally.finished["error_numerics"]  # sampled, and no token
    )


async def test_open_calls_are_a_level() -> None:
    steps = Steps()
    async with run_server(steps) as running, connect(running) as client:
        level = running.engine.metrics.value
        async with asyncio.TaskGroup() as group:
            for _ in range(3):
                group.create_task(client.generate("Hi!", max_tokens=2))
            await until(lambda: level("open_calls") == 3)
            steps.open()
        await until(lambda: level("open_calls") == 0)


async def test_a_refusal_for_too_many_calls_is_a_refused_request_where_it_was_one() -> None:
    metrics = Metrics()
    async with run_server() as running:
        limits = running.engine.config.limits.model_copy(update={"max_open_calls": 1})
        edge = Edge(limits, metrics)
        async with edge.call(stub(), "ListModels"):
            for method in ("Generate", "Tokenize"):
                with pytest.raises(AbortedError):
                    async with edge.call(stub(), method):
                        raise AssertionError("there was room")
    assert by_label(metrics, "requests_refused_total") == {"queue_full": 1}
    assert metrics.value("rpcs_total", method="Tokenize", code="RESOURCE_EXHAUSTED") == 1
    assert metrics.value("rpcs_total", code="OK") == 1
    assert metrics.value("rpcs_total") == 3


@pytest.mark.parametrize(
    ("remaining_s", "code"), [(None, "CANCELLED"), (3.0, "CANCELLED"), (-0.1, "DEADLINE_EXCEEDED")]
)
async def test_a_call_that_the_transport_ends_is_counted_by_its_cause(
    remaining_s: float | None, code: str
) -> None:
    metrics = Metrics()
    async with run_server() as running:
        edge = Edge(running.engine.config.limits, metrics)
        with pytest.raises(asyncio.CancelledError):
            async with edge.call(stub(remaining_s), "Generate"):
                raise asyncio.CancelledError
    assert metrics.value("rpcs_total", method="Generate", code=code) == 1
    assert metrics.value("rpcs_total") == 1
    assert metrics.value("requests_refused_total") == 0


async def test_a_status_that_comes_behind_the_transports_end_is_no_fault() -> None:
    metrics = Metrics()
    context = Stub(None, abort_error=grpc.aio.InternalError())
    async with run_server() as running:
        edge = Edge(running.engine.config.limits, metrics)
        with pytest.raises(asyncio.CancelledError):
            async with edge.call(typing.cast("Context", context), "Generate"):
                raise DeadlineError("the deadline passed")
    assert metrics.value("rpcs_total", method="Generate", code="DEADLINE_EXCEEDED") == 1
    assert metrics.value("rpcs_total") == 1


class AbortedError(Exception):
    """What `abort_with_status` raises."""


def stub(remaining_s: float | None = None) -> Context:
    return typing.cast("Context", Stub(remaining_s))


class Stub:
    """As much of a servicer's context as the edge looks at."""

    def __init__(self, remaining_s: float | None, *, abort_error: Exception | None = None) -> None:
        self._remaining_s = remaining_s
        self._abort_error = abort_error

    def time_remaining(self) -> float | None:
        return self._remaining_s

    async def abort_with_status(self, status: grpc.Status) -> None:
        raise self._abort_error or AbortedError(status.code)
