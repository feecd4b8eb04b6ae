"""How long a token of a prompt takes, found out at start-up."""

import time
from collections.abc import Callable

import jax
import numpy as np

from jaxserve.plan import Bucket, Chunk, StepPlan
from jaxserve.runner.batch import build_packed, find_plan_bucket
from jaxserve.runner.buckets import BucketScheme
from jaxserve.runner.spec import RunnerSpec

NUM_TIMED = 2  # runs, of which the faster counts: the other was disturbed


def time_prompt(
    run_forward: Callable[[Bucket, np.ndarray], jax.Array],
    *,
    scheme: BucketScheme,
    spec: RunnerSpec,
    max_model_tokens: int,
) -> float:
    """Returns the seconds of a token in the largest chunk. It writes to pages that nobody has yet.

    Args:
      run_forward: returns a mark that is ready when the forward is done.
    """
    num_tokens = min(
        scheme.limits.max_chunk_tokens, max_model_tokens, (spec.num_pages - 1) * spec.page_size
    )
    pages = tuple(range(1, 1 + -(-num_tokens // spec.page_size)))
    chunk = Chunk(
        sequence_id=0,
        row=0,
        start=0,
        num_tokens=num_tokens,
        token_ids=(0,) * num_tokens,
        samples=False,
        output_index=0,
        prompt_len=num_tokens,
        new_pages=pages,
    )
    plan = StepPlan(step_id=0, others=(chunk,))
    bucket = find_plan_bucket(plan, scheme)
    seconds: list[float] = []
    for _ in range(1 + NUM_TIMED):  # the first warms up
        started_s = time.monotonic()
        run_forward(bucket, build_packed(plan, bucket, spec)).block_until_ready()
        seconds.append(time.monotonic() - started_s)
    return min(seconds[1:]) / num_tokens
