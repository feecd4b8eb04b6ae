"""Whether the phases add up to what a client sees, and what measuring them costs.

    .venv/bin/python bench/phases.py
    .venv/bin/python bench/phases.py path/to/model --requests 100 --repeats 8

Conservation: a server of its own process, a client in this one, on loopback. The residual of a
request is the client's time from sending to the last byte, less the server's queue, prefill, decode
and delivery; wanted is that it is at most the larger of 1 % and 2 ms.

Cost: what `StepClock` is told in a step of this model, told again many times and timed (profiled),
by the time of a step; wanted is at most 1 %. And the same load with measure.phases on and off, in
turns: the noise is how far runs of one kind lie apart, and the difference says something only where
it is larger.
"""

import argparse
import asyncio
import re
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path

import jaxserve
from jaxserve import LLM
from jaxserve.client import AsyncClient, Finish
from jaxserve.config import MeasureSection, load_config
from jaxserve.engine.step_clock import StepClock
from jaxserve.measure.phases import StepCosts
from jaxserve.metrics import Metrics
from jaxserve.plan import Bucket, Chunk, HostPhase, StepMasks, StepPlan, StepResult
from jaxserve.request import SamplingParams

PROMPT_LEN = 48
WANTED_SHARE, WANTED_S = 0.01, 0.002
NUM_PROFILED = 50_000


def main() -> int:
    options = read_options()
    residuals_hold = measure_conservation(options)
    cost_holds = measure_cost(options)
    return 0 if residuals_hold and cost_holds else 1


def prompt_of(number: int) -> list[int]:
    return [(number * 37 + place * 11) % 1000 + 5 for place in range(PROMPT_LEN)]


# conservation


def measure_conservation(options: argparse.Namespace) -> bool:
    program = str(Path(sys.executable).parent / "jaxserve")
    command = [program, "serve", options.model, "--port", "0"]
    if options.config:
        command += ["--config", str(options.config)]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as server:
        assert server.stderr is not None
        try:
            target = next(
                found.group(1)
                for line in server.stderr
                if (found := re.search(r"serving .*address=(\S+)", line))
            )
            # its log goes on: nobody reads it, and it must not fill the pipe
            threading.Thread(target=server.stderr.read, daemon=True).start()
            holds = True
            for at_once in (1, options.at_once):
                pairs = asyncio.run(send_all(target, options, at_once=at_once))
                holds &= tell_residuals(pairs, at_once=at_once)
        finally:
            server.terminate()
    return holds


async def send_all(
    target: str, options: argparse.Namespace, *, at_once: int
) -> list[tuple[float, float]]:
    """Returns each request's seconds as the client saw them, and as the server tells them."""
    pairs: list[tuple[float, float]] = []
    numbers = iter(range(-at_once, options.requests))  # the first warm up

    async def send_some(client: AsyncClient) -> None:
        for number in numbers:
            pair = await send(client, number, num_tokens=options.tokens)
            if number >= 0:
                pairs.append(pair)

    async with AsyncClient(target) as client:
        await asyncio.gather(*(send_some(client) for _ in range(at_once)))
    return pairs


async def send(client: AsyncClient, number: int, *, num_tokens: int) -> tuple[float, float]:
    timings = None
    sent_s = time.perf_counter()
    async for event in client.stream(
        prompt_of(number), max_tokens=num_tokens, ignore_eos=True, temperature=0.0
    ):
        if isinstance(event, Finish):
            timings = event.timings
    took_s = time.perf_counter() - sent_s
    assert timings is not None, "a stream ends with its finish, and that has its times"
    phases_s = timings.queue_s + timings.prefill_s + timings.decode_s + timings.delivery_s
    return took_s, phases_s


def tell_residuals(pairs: Sequence[tuple[float, float]], *, at_once: int) -> bool:
    residuals_s = sorted(took_s - phases_s for took_s, phases_s in pairs)
    shares = [(took_s - phases_s) / took_s for took_s, phases_s in pairs]
    num_within = sum(
        took_s - phases_s <= max(WANTED_SHARE * took_s, WANTED_S) for took_s, phases_s in pairs
    )
    ms = [1e3 * residuals_s[min(len(pairs) - 1, round(q * len(pairs)))] for q in (0.5, 0.95, 1)]
    print(
        f"conservation, {at_once} at once: {len(pairs)} requests of "
        f"{1e3 * statistics.median(took for took, _ in pairs):.1f} ms (median); residual p50 "
        f"{ms[0]:.2f} p95 {ms[1]:.2f} max {ms[2]:.2f} ms, {statistics.mean(shares):.2%} on "
        f"average; within max(1 %, 2 ms): {num_within / len(pairs):.1%}",
        flush=True,
    )
    return num_within == len(pairs)


# cost


def measure_cost(options: argparse.Namespace) -> bool:
    config = load_config(options.config, flags={"measure.phases": True})
    off = load_config(options.config, flags={"measure.phases": False})
    params = SamplingParams(temperature=0.0, max_tokens=options.tokens, ignore_eos=True)
    prompts = [prompt_of(number) for number in range(options.seqs)]
    with LLM(options.model, config) as with_phases, LLM(options.model, off) as without:
        step_s: dict[bool, list[float]] = {True: [], False: []}
        for llm in (with_phases, without):
            llm.generate(prompts, params)  # caches are warm
        costs = StepCosts.of(with_phases.engine.metrics)
        for number in range(2 * options.repeats):
            is_on = number % 4 in (1, 2)  # off, on, on, off
            llm = with_phases if is_on else without
            before = StepCosts.of(llm.engine.metrics).num_steps
            started_s = time.perf_counter()
            llm.generate(prompts, params)
            taken_s = time.perf_counter() - started_s
            num_steps = StepCosts.of(llm.engine.metrics).num_steps - before
            step_s[is_on].append(taken_s / num_steps)
        costs = StepCosts.of(with_phases.engine.metrics).since(costs)
    shares = ", ".join(f"{phase} {share:.1%}" for phase, share in costs.host_shares.items())
    print(f"engine thread: {shares}; host gap {costs.host_gap_share or 0:.2%}")
    on_s, off_s = (statistics.median(step_s[is_on]) for is_on in (True, False))
    noise = max(max(times) / min(times) - 1 for times in step_s.values())
    print(
        f"a step of {options.seqs} rows: {1e3 * off_s:.3f} ms off, {1e3 * on_s:.3f} ms on (median "
        f"of {options.repeats}, in turns): {on_s / off_s - 1:+.2%}; noise {noise:.1%}"
    )
    own_s = profile_step(options.seqs)
    print(f"profiled: {1e6 * own_s:.2f} µs a step, {own_s / off_s:.3%} of it")
    return own_s <= WANTED_SHARE * off_s


class Flight:
    """A step of which the device is done when its result is wanted."""

    def __init__(self, result: StepResult) -> None:
        self._result = result
        self.has_ended = False

    def is_ready(self) -> bool:
        return self.has_ended

    def launch_output(self, masks: StepMasks) -> None:
        raise AssertionError("no row of it is masked")

    def wait(self) -> None:
        return None

    def result(self) -> StepResult:
        return self._result


def profile_step(num_rows: int) -> float:
    """Returns the seconds that a step's stamps take, readers' excepted, flushes included."""
    metrics = Metrics()
    clock = StepClock(MeasureSection(), metrics, time.monotonic, name_of=str)
    bucket = Bucket(decode_seqs=num_rows, verify_tokens=1, chunk_tokens=0)
    result = StepResult(token_ids={}, not_finite=frozenset(), bucket=bucket)
    chunk = Chunk(
        sequence_id=1, row=0, start=0, num_tokens=1, token_ids=None, samples=True, output_index=0,
        prompt_len=1,
    )  # fmt: skip
    plan = StepPlan(step_id=1, others=(chunk,) * num_rows)
    host: tuple[HostPhase, ...] = ("schedule", "build", "dispatch")
    before = Flight(result)
    clock.note_launch(plan, before)
    started_s = time.perf_counter()
    for _ in range(NUM_PROFILED):
        for phase in host:
            clock.lap(phase)
        flight = Flight(result)
        clock.note_launch(plan, flight)
        before.has_ended = True
        clock.lap("wait")
        clock.lap("readback")
        clock.note_result(result)
        clock.lap("detokenize")
        clock.end_turn()
        before = flight
    return (time.perf_counter() - started_s) / NUM_PROFILED


def read_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=(__doc__ or "").splitlines()[0],
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    parser.add_argument("model", nargs="?", default="smollm2-135m-instruct")
    parser.add_argument("--config", type=Path, help="a TOML file")
    parser.add_argument("--requests", type=int, default=40, help="at each number at once")
    parser.add_argument("--at-once", type=int, default=4, help="requests, beside 1")
    parser.add_argument("--tokens", type=int, default=48, help="of each output")
    parser.add_argument("--seqs", type=int, default=8, help="rows of a step, for the cost")
    parser.add_argument("--repeats", type=int, default=4, help="runs of each kind, for the cost")
    return parser.parse_args()


if __name__ == "__main__":
    print(f"jaxserve {jaxserve.__version__}")
    sys.exit(main())
