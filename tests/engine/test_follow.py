"""One engine after the other on a runner that is loaded once."""

import dataclasses
import time

import pytest

from jaxserve.config import SchedulerSection
from jaxserve.request import SamplingParams
from tests.engines import ask, build_engine, gather, serve
from tests.fakes import expected_output

PROMPT = tuple(range(60, 77))


def test_the_next_engine_serves_under_another_configuration_and_knows_the_steps_times() -> None:
    engine, runner = build_engine(num_pages=40, clock=time.monotonic)
    with serve(engine, runner):
        gather(engine.submit(ask(PROMPT, max_tokens=3)))
    runner._last_step_id = None  # the next one counts from the start
    scheduler = SchedulerSection(policy="edf", max_seqs=2)
    following = engine.follow(engine.config.model_copy(update={"scheduler": scheduler}))
    with serve(following, runner):
        asked = dataclasses.replace(ask(PROMPT, max_tokens=3), priority=1)
        output = gather(following.submit(asked))
    assert output.token_ids == expected_output(PROMPT, SamplingParams(temperature=0.0), 3)
    assert output.finished.usage is not None
    assert output.finished.usage.cached_prompt_tokens == 0  # what was kept is not its own
    assert following.step_times is engine.step_times
    assert following.config.scheduler.policy == "edf"


def test_two_engines_never_share_a_runner() -> None:
    engine, runner = build_engine()
    with serve(engine, runner):
        with pytest.raises(AssertionError, match="two engines on one runner"):
            engine.follow(engine.config)
