"""Many threads at once: random aborts, deadlines, slow and vanishing readers; nothing is lost."""

import asyncio
import collections
import dataclasses
import functools
import itertools
import random
import threading
from collections.abc import Callable, Iterator

import pytest

from jaxserve.config import LimitsSection
from jaxserve.engine import (
    ChoiceFinished,
    Delta,
    Engine,
    EngineState,
    Event,
    Finished,
    Started,
    Stream,
)
from jaxserve.engine.live_request import MIN_FOLLOWED_BYTES
from jaxserve.errors import DeadlineError, QueueFullError, RequestError, SlowReaderError
from jaxserve.plan import TokenMask
from jaxserve.request import FinishReason, GenerationRequest, SamplingParams, StructuredOutput
from jaxserve.text.constraints import Constraints
from tests.engines import ask, build_engine, gather, serve
from tests.fakes import EOS_ID, VOCAB_SIZE, build_byte_tokenizer, expected_output
from tests.text.masks import fill_mask

NUM_THREADS = 6
NUM_REQUESTS = 70  # of each thread
GREEDY = SamplingParams(temperature=0.0)
SEED = 11
ALLOWED = tuple(range(40, 120))
FORMS = (
    StructuredOutput(kind="regex", text="[a-z]{12,}"),
    StructuredOutput(kind="regex", text="([ab]c){1,6}d?"),
    StructuredOutput(kind="json_object"),
)


class Ticks:
    """A clock that moves a little each time it is looked at: deadlines fall anywhere."""

    def __init__(self) -> None:
        self._ticks = itertools.count()

    def __call__(self) -> float:
        return next(self._ticks) * 0.001


def any_request(rng: random.Random, engine: Engine) -> GenerationRequest:
    prompt = tuple(rng.randrange(256) for _ in range(rng.randint(1, 24)))
    form = rng.choice([None, None, *FORMS])
    request = ask(
        prompt,
        max_tokens=rng.randint(1, 16),
        ignore_eos=form is None,
        temperature=0.9,
        seed=SEED,
        stop_strings=rng.choice([(), (), ("zz", "q")]),
        num_choices=rng.choice([1, 1, 2, 4]),
        logprobs=rng.choice([None, None, 1]),
        prompt_logprobs=rng.choice([None, None, 0]),
        allowed_token_ids=rng.choice([None, None, ALLOWED]),
    )
    soon_s = engine.now() + rng.random()
    return dataclasses.replace(
        request,
        structured_output=form,
        deadline_s=soon_s if rng.random() < 0.2 else None,
        priority=rng.choice([0, 0, 0, 1]),
        tenant=rng.choice(["", "a"]),
    )


@functools.cache
def constraints() -> Constraints:
    return Constraints(build_byte_tokenizer(), eos_ids={EOS_ID}, vocab_size=VOCAB_SIZE)


def what_it_gets(request: GenerationRequest, choice: int, num_tokens: int) -> list[int]:
    """Returns the first tokens of a choice of the request alone."""
    assert isinstance(request.prompt, tuple)
    is_masked = constraints().build(request.sampling, request.structured_output) is not None

    def mask_of(output: tuple[int, ...]) -> TokenMask:
        constraint = constraints().build(request.sampling, request.structured_output)
        assert constraint is not None
        constraint.read(output)
        return fill_mask(constraint)

    return expected_output(
        request.prompt,
        SamplingParams(temperature=0.9),
        num_tokens,
        seed=SEED,
        choice=choice,
        mask_of=mask_of if is_masked else None,
    )


class Tally:
    """How requests ended, over all threads; and what was wrong, if anything."""

    def __init__(self) -> None:
        self.ends: collections.Counter[str] = collections.Counter()
        self.num_tokens = 0
        self.num_first_tokens = 0  # of choices after a request's first
        self.faults: list[str] = []
        self._lock = threading.Lock()

    def read(self, request: GenerationRequest, events: Iterator[Event]) -> None:
        """Reads to the end and compares with what the request alone would get."""
        token_ids: list[list[int]] = [[] for _ in range(request.sampling.num_choices)]
        ended: set[int] = set()
        end = ""
        try:
            for event in events:
                if end:
                    self._blame(f"{event} after the end")
                match event:
                    case Delta():
                        token_ids[event.index] += event.token_ids
                        self._check_delta(request, event, ended)
                    case ChoiceFinished():
                        ended.add(event.index)
                    case Finished():
                        ended.add(event.index)
                        end = event.reason.value
                        if event.usage.completion_tokens != sum(map(len, token_ids)):
                            self._blame(f"usage {event.usage} for {token_ids}")
                        if len(ended) < len(token_ids):
                            self._blame(f"only choices {ended} have ended")
        except (DeadlineError, SlowReaderError) as error:
            end = type(error).__name__
        for choice, found in enumerate(token_ids):
            wanted = what_it_gets(request, choice, len(found))
            if found != wanted:
                self._blame(f"choice {choice} is {found}, not {wanted}")
        with self._lock:
            self.ends[end or "nothing"] += 1
            self.num_tokens += sum(map(len, token_ids))
            self.num_first_tokens += sum(map(bool, token_ids[1:]))

    def _check_delta(self, request: GenerationRequest, delta: Delta, ended: set[int]) -> None:
        if delta.index in ended:
            self._blame(f"{delta} after the choice's end")
        asked_ids = () if request.sampling.logprobs is None else delta.token_ids
        if tuple(entry.token_id for entry in delta.logprobs) != asked_ids:
            self._blame(f"log-probabilities {delta.logprobs} of {delta.token_ids}")

    def _blame(self, fault: str) -> None:
        with self._lock:
            self.faults.append(fault)


def user(engine: Engine, tally: Tally, seed: int) -> None:
    """One thread's requests: some read, some given up, some forgotten for a while."""
    rng = random.Random(seed)
    unread: list[tuple[GenerationRequest, Iterator[Event]]] = []
    for _ in range(NUM_REQUESTS):
        request = any_request(rng, engine)
        try:
            stream = engine.submit(request)
        except QueueFullError:
            for late in unread:
                tally.read(*late)
            unread.clear()
            stream = wait_for_room(engine, request)
        match rng.randrange(5):
            case 0:
                stream.cancel()
                tally.read(request, iter(stream))
            case 1:
                engine.abort(stream.request_id, request.tenant)
                unread.append((request, iter(stream)))
            case 2:
                unread.append((request, iter(stream)))
            case _:
                tally.read(request, iter(stream))
    for late in unread:
        tally.read(*late)


def wait_for_room(engine: Engine, request: GenerationRequest) -> Stream:
    while True:
        try:
            return engine.submit(request)
        except QueueFullError:
            continue


def run_threads(targets: list[Callable[[], None]]) -> None:
    errors: list[BaseException] = []

    def guard(target: Callable[[], None]) -> None:
        try:
            target()
        except BaseException as error:
            errors.append(error)
            raise

    threads = [threading.Thread(target=guard, args=(target,)) for target in targets]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert errors == []


@pytest.mark.parametrize("overlap", [True, False])
@pytest.mark.parametrize("buffer_bytes", [20 * 12, MIN_FOLLOWED_BYTES])  # none is followed; some
def test_every_request_ends_once_whatever_its_callers_do(overlap: bool, buffer_bytes: int) -> None:
    engine, runner = build_engine(
        clock=Ticks(),
        overlap=overlap,
        bounds=LimitsSection(max_waiting_requests=20, stream_buffer_bytes=buffer_bytes),
    )
    tally = Tally()
    with serve(engine, runner):
        run_threads([functools.partial(user, engine, tally, seed) for seed in range(NUM_THREADS)])
        canary = gather(engine.submit(ask((1, 2, 3), ignore_eos=True)))
    assert tally.faults == []
    assert tally.ends.total() == NUM_THREADS * NUM_REQUESTS
    wanted = {"cancelled", "max_tokens", "eos", "DeadlineError"}
    if buffer_bytes < MIN_FOLLOWED_BYTES:
        wanted.add("SlowReaderError")
    assert set(tally.ends) >= wanted, tally.ends
    assert canary.token_ids == expected_output((1, 2, 3), GREEDY, 8)
    assert engine.state is EngineState.STOPPED
    assert engine.metrics.value("batched_masks_total") > 0
    submitted = engine.metrics.value("requests_submitted_total")
    assert submitted == NUM_THREADS * NUM_REQUESTS + 1
    check_metrics(engine, tally)


def check_metrics(engine: Engine, tally: Tally) -> None:
    """What was counted is what the readers saw, and one canary of eight tokens."""
    value = engine.metrics.value
    labels = {"DeadlineError": "error_deadline", "SlowReaderError": "error_slow_reader"}
    ends = collections.Counter({labels.get(end, end): n for end, n in tally.ends.items()})
    ends["max_tokens"] += 1
    for end, count in ends.items():
        assert value("requests_finished_total", reason=end) == count, end
    assert value("requests_finished_total") == ends.total()
    num_tokens = tally.num_tokens + 8
    assert value("output_tokens_total") == num_tokens
    assert value("delivery_seconds_count") == num_tokens
    assert value("request_output_tokens_sum") == num_tokens
    num_firsts = value("time_to_first_token_seconds_count") + tally.num_first_tokens
    assert value("inter_token_seconds_count") + num_firsts == num_tokens
    for level in ("requests_running", "requests_waiting", "waiting_tokens", "kv_usage_ratio"):
        assert value(level) == 0, level


@pytest.mark.asyncio
async def test_sixty_four_tasks_a_third_of_them_cancelled() -> None:
    engine, runner = build_engine()
    rng = random.Random(7)
    ended: collections.Counter[str] = collections.Counter()

    async def read(number: int, num_events: int | None) -> None:
        prompt = (number, number + 1)
        stream = engine.submit(ask(prompt, max_tokens=20, ignore_eos=True))
        token_ids: list[int] = []
        num_seen = 0
        async for event in stream:
            num_seen += 1
            match event:
                case Started():
                    assert num_seen == 1
                case Delta():
                    token_ids += event.token_ids
                case Finished():
                    assert event.reason is FinishReason.MAX_TOKENS
                    assert token_ids == expected_output(prompt, GREEDY, 20)
                    ended["whole"] += 1
            if num_seen == num_events:
                break

    with serve(engine, runner):
        tasks = [
            asyncio.create_task(read(n, rng.randint(1, 3) if n % 6 == 0 else None))
            for n in range(64)
        ]
        await asyncio.sleep(0)
        for n in range(1, 64, 6):
            tasks[n].cancel()
        results = await asyncio.gather(*tasks, return_exceptions=True)
        await asyncio.to_thread(engine.drain, 600.0)
    num_cancelled = sum(isinstance(result, asyncio.CancelledError) for result in results)
    assert [r for r in results if r and not isinstance(r, asyncio.CancelledError)] == []
    assert num_cancelled == 11
    assert ended["whole"] >= 64 - 11 - 11


def test_refusals_in_the_middle_of_it_all_change_nothing() -> None:
    engine, runner = build_engine()
    with serve(engine, runner):
        streams = []
        for n in range(30):
            streams.append(engine.submit(ask((n,), ignore_eos=True)))
            with pytest.raises(RequestError):
                engine.submit(ask((n, 999)))
        outputs = [gather(stream) for stream in streams]
    for n, output in enumerate(outputs):
        assert output.token_ids == expected_output((n,), GREEDY, 8)
