"""What scheduling costs the host: schedule and commit, per token, without a device.

    python bench/scheduling.py
    python bench/scheduling.py --running 1000 --running 10000 --waiting 0 --waiting 50000

Every row decodes; rows that end are filled from the queue, which stays as long as it was. The time
is this process's own (process_time), so that other processes disturb it little.
"""

import argparse
import collections
import itertools
import time
from collections.abc import Iterator

from jaxserve.config import SchedulerSection
from jaxserve.engine.interpreter import tune_interpreter
from jaxserve.identity import CacheIdentity
from jaxserve.metrics import Metrics
from jaxserve.plan import Bucket, StepLimits, StepPlan, StepResult
from jaxserve.request import Request, SamplingParams
from jaxserve.scheduler.page_pool import PagePool
from jaxserve.scheduler.prefix_cache import PrefixCache
from jaxserve.scheduler.scheduler import Scheduler

PROMPT_TOKENS = 16
OUTPUT_TOKENS = 100
PAGE_SIZE = 16
GREEDY = SamplingParams(temperature=0.0)
IDENTITY = CacheIdentity(weights="", tokenizer="", positions="", kv_dtype="", page_size=PAGE_SIZE)
BUCKET = Bucket(decode_seqs=1, verify_tokens=1, chunk_tokens=0)


class Loop:
    """The engine's loop, two steps in flight, with a device that takes no time.

    Attributes:
      seconds: of schedule, and of commit, in this process.
    """

    def __init__(
        self, num_running: int, num_waiting: int, *, policy: str, prefix_order: bool
    ) -> None:
        pages = -(-(PROMPT_TOKENS + OUTPUT_TOKENS) // PAGE_SIZE)
        cache = PrefixCache(PAGE_SIZE) if prefix_order else None
        num_chunk_pages = num_running * -(-PROMPT_TOKENS // PAGE_SIZE)
        pool = PagePool(1 + num_running * (pages + 1) + num_chunk_pages, PAGE_SIZE, cache=cache)
        config = SchedulerSection(policy=policy, prefix_order=prefix_order)
        self.scheduler = Scheduler(
            config=config.model_copy(update={"max_seqs": num_running, "max_chunks": num_running}),
            reserve="on_demand",
            pool=pool,
            limits=StepLimits(
                max_rows=num_running,
                max_chunk_tokens=num_running * PROMPT_TOKENS,
                chunk_tile=PROMPT_TOKENS,
                max_chunks=num_running,
                max_seqs=num_running,
            ),
            max_model_tokens=PROMPT_TOKENS + OUTPUT_TOKENS,
            overlap_depth=2,
            metrics=Metrics(),
        )
        self.seconds = {"schedule": 0.0, "commit": 0.0}
        self._in_flight: collections.deque[StepPlan] = collections.deque()
        self._requests = _make_requests(IDENTITY if prefix_order else None)
        for _ in range(num_running + num_waiting):
            self.scheduler.add(next(self._requests))

    def step(self) -> int:
        """Returns the tokens that one round scheduled."""
        began_s = time.process_time()
        plan = self.scheduler.schedule(0.0)
        self.seconds["schedule"] += time.process_time() - began_s
        if plan.has_work:
            self._in_flight.append(plan)
        if len(self._in_flight) == 2 or not plan.has_work:
            self._retire(self._in_flight.popleft())
        return plan.num_tokens

    def _retire(self, plan: StepPlan) -> None:
        token_ids = {chunk.sequence_id: 7 for chunk in plan.chunks if chunk.samples}
        result = StepResult(token_ids=token_ids, not_finite=frozenset(), bucket=BUCKET)
        began_s = time.process_time()
        updates = self.scheduler.commit(plan, result)
        ended = [update.sequence.request for update in updates if update.finish]
        for request in ended:
            self.scheduler.finish(request)
        self.seconds["commit"] += time.process_time() - began_s
        for _ in ended:
            self.scheduler.add(next(self._requests))


def _make_requests(identity: CacheIdentity | None) -> Iterator[Request]:
    """Outputs of 50 to 100 tokens, so that few end in one step."""
    for number in itertools.count():
        yield Request(
            id=str(number),
            prompt=(1,) * PROMPT_TOKENS,
            sampling=GREEDY,
            seed=0,
            max_tokens=OUTPUT_TOKENS - number * 7 % 50,
            ends_by_context=False,
            stop_ids={},
            arrival_s=0.0,
            queue_deadline_s=600.0,
            is_followed=True,
            tenant=f"t{number % 8}",
            cache_identity=identity,
        )


def measure(
    num_running: int, num_waiting: int, *, policy: str, prefix_order: bool, num_tokens: int
) -> str:
    """Returns a line of the table."""
    loop = Loop(num_running, num_waiting, policy=policy, prefix_order=prefix_order)
    while loop.scheduler.num_running < num_running:
        loop.step()
    for _ in range(3):
        loop.step()
    loop.seconds = {"schedule": 0.0, "commit": 0.0}
    done = num_steps = 0
    while done < num_tokens:
        done += loop.step()
        num_steps += 1
    schedule_us, commit_us = (1e6 * loop.seconds[part] / done for part in ("schedule", "commit"))
    return (
        f"{policy:>9} {num_running:>8} {num_waiting:>8} {num_steps:>6} {schedule_us:>10.2f} "
        f"{commit_us:>8.2f} {schedule_us + commit_us:>8.2f}"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--running", type=int, action="append", metavar="N")
    parser.add_argument("--waiting", type=int, action="append", metavar="N")
    parser.add_argument("--policy", action="append", metavar="P", help="(default: priority)")
    parser.add_argument("--prefix-order", action="store_true", help="with the prefix cache")
    parser.add_argument("--num-tokens", type=int, default=300_000, metavar="N")
    options = parser.parse_args()
    print("µs of process time a scheduled token")
    print("   policy  running  waiting  steps   schedule   commit     both")
    combinations = itertools.product(
        options.policy or ["priority"],
        options.running or [100, 1000, 10_000],
        options.waiting or [0, 50_000],
    )
    for policy, num_running, num_waiting in combinations:
        tune_interpreter(num_running)  # as a server of so many rows
        print(
            measure(
                num_running,
                num_waiting,
                policy=policy,
                prefix_order=options.prefix_order,
                num_tokens=options.num_tokens,
            ),
            flush=True,
        )


if __name__ == "__main__":
    main()
