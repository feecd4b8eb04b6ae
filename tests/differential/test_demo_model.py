"""The demo model's greedy tokens, through chunks, preemption, overlap and mates at once.

`golden_demo.json` holds what HF transformers 5.24 gives in float32 for the same GGUF
(`scripts/judges/greedy.py transformers`): prompts whose first 24 tokens all lead by more
than 0.01.
"""

import json
from pathlib import Path

import pytest

from jaxserve.config import load_config
from jaxserve.engine import Engine, EngineState, Stream
from jaxserve.engine.start import load_engine
from jaxserve.request import GenerationRequest, SamplingParams
from tests.engines import check_idle, gather

GOLDEN = json.loads(Path(__file__).with_name("golden_demo.json").read_text())
PREEMPT_AT = (6, 17, 29, 42, 56)  # steps


@pytest.fixture(scope="module")
def engine() -> Engine:
    """Not started: the test moves it. Rows for half of the prompts at a time."""
    flags = {
        "model.dtype": "float32",
        "model.max_model_tokens": 128,
        "kv.num_pages": 40,
        "scheduler.max_seqs": 3,
        "buckets.decode_seqs": (3,),
        "buckets.chunk_tokens": (8,),
        "buckets.chunk_decode_seqs": (3,),
        "buckets.chunk_tile": 4,
        "runner.forbid_recompile": True,
    }
    engine = load_engine("smollm2-135m-instruct", load_config(flags=flags))
    engine._change_state(EngineState.SERVING)
    return engine


@pytest.mark.demo
def test_the_demo_model_says_what_transformers_says(engine: Engine) -> None:
    params = SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True)
    streams: list[Stream] = [
        engine.submit(GenerationRequest(prompt=tuple(golden["prompt_ids"]), sampling=params))
        for golden in GOLDEN
    ]
    steps = 0
    while engine._intake.live() or engine._loop._in_flight:
        engine._loop.step()
        steps += 1
        if steps in PREEMPT_AT and (running := list(engine._scheduler._running)):
            engine._scheduler.preempt(running[steps % len(running)].request)
    assert [gather(stream).token_ids for stream in streams] == [
        golden["output_ids"] for golden in GOLDEN
    ]
    metrics = engine.metrics
    assert metrics.value("preemptions_total") == len(PREEMPT_AT)
    assert metrics.value("chunked_prompts_total") > 0
    assert metrics.value("overlapped_steps_total") > 0
    assert metrics.value("joined_running_total") > 0
    check_idle(engine)
