"""Whole engines on the real runner and a tiny model, moved step by step in the test's thread."""

import dataclasses
import functools
from pathlib import Path

import jax

from jaxserve.config import Config
from jaxserve.engine import Engine, EngineState, ServedModel
from jaxserve.metrics import Metrics
from jaxserve.model.config import LayerConfig, ModelConfig, RopeConfig
from jaxserve.model.params import Params, init_params
from jaxserve.request import GenerationRequest, Request, SamplingParams, SequenceState
from jaxserve.runner.runner import Runner
from tests.engines import Output, gather
from tests.fakes import build_byte_tokenizer

# head_dim is not hidden / heads, heads are grouped, the vocabulary is padded.
MODEL = ModelConfig(
    architecture="llama",
    vocab_size=131,
    hidden_size=48,
    num_heads=8,
    num_kv_heads=2,
    head_dim=16,
    mlp_size=112,
    max_position=128,
    norm_eps=1e-5,
    layers=(LayerConfig(rope=RopeConfig(theta=10000.0)),) * 3,
    tied_head=False,
)
# Of sizes that the native products take.
EVEN_MODEL = dataclasses.replace(MODEL, hidden_size=64, mlp_size=160)
EOS_ID = 130


@functools.cache
def tiny_params(dtype: str = "float32", model: ModelConfig = MODEL) -> Params:
    return init_params(model, jax.random.key(3), dtype)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Shape:
    """What decides the compiled programs of a runner."""

    chunk: int
    decode_seqs: tuple[int, ...]
    dtype: str = "float32"
    attention: str = "xla"
    matmul: str = "xla"
    filters: str = "candidates"

    @property
    def model(self) -> ModelConfig:
        return EVEN_MODEL if self.matmul == "native" else MODEL

    @property
    def config(self) -> Config:
        tile = min(self.chunk, 16)
        return Config.model_validate(
            {
                "model": {"dtype": self.dtype, "max_model_tokens": 96},
                "kv": {"page_size": 4, "num_pages": 1 + 24 * 64},
                "scheduler": {"max_seqs": self.decode_seqs[-1]},
                "buckets": {
                    "decode_seqs": self.decode_seqs,
                    "chunk_tokens": (self.chunk,),
                    "chunk_decode_seqs": (self.decode_seqs[-1],),
                    "chunk_tile": tile,
                },
                "limits": {"max_logit_bias": 4, "max_stop_token_ids": 4},
                "runner": {
                    "forbid_recompile": True,
                    "attention": self.attention,
                    "matmul": self.matmul,
                    "sampling": self.filters,
                },
            }
        )


def build_runner(shape: Shape, cache_dir: Path) -> Runner:
    return Runner(
        tiny_params(shape.dtype, shape.model),
        shape.model,
        shape.config,
        metrics=Metrics(),
        cache_dir=cache_dir,
    )


def build_engine(
    runner: Runner, config: Config, *, changing_ropes: tuple[tuple[str, int], ...] = ()
) -> Engine:
    """Returns an engine that takes requests, but whose thread does not run: tests call `_step`."""
    model = ServedModel(
        name="tiny",
        max_model_tokens=runner.max_model_tokens,
        vocab_size=MODEL.vocab_size,
        eos_ids=frozenset({EOS_ID}),
        changing_ropes=changing_ropes,
    )
    engine = Engine(
        runner=runner,
        tokenizer=build_byte_tokenizer(),
        config=config,
        model=model,
        metrics=runner._metrics,
    )
    engine._change_state(EngineState.SERVING)
    return engine


def run_to_end(
    engine: Engine,
    target: GenerationRequest,
    *,
    mates: list[GenerationRequest],
    preempt_at: int | None = None,
) -> tuple[Output, int]:
    """Runs the target among its mates; returns its output and how often it was preempted.

    Half of the mates are there before the target, the others join while it runs.

    Args:
      preempt_at: take the target's pages and row once, as soon as it has this many output tokens.
    """
    early, late = mates[::2], mates[1::2]
    for mate in early:
        engine.submit(mate)
    for _ in range(2 if early else 0):
        engine._loop.step()
    stream = engine.submit(target)
    live = engine._intake.find(stream.request_id)
    assert live is not None
    request = live.request
    steps = 0
    while engine._intake.live() or engine._loop._in_flight:
        if steps % 2 == 1 and late:
            engine.submit(late.pop())
        if _is_time(request, preempt_at):
            engine._scheduler.preempt(request)
        engine._loop.step()
        engine._pool.check()
        steps += 1
        assert steps < 5000, "the target is stuck"
    return gather(stream), request.sequences[0].num_preemptions


def _is_time(request: Request, at: int | None) -> bool:
    if at is None or not request.sequences:  # it is still in the inbox
        return False
    (sequence,) = request.sequences
    if sequence.num_preemptions or sequence.state is not SequenceState.RUNNING:
        return False
    return len(sequence.output) >= at and sequence.num_computed > 0


def make_mates(count: int) -> list[GenerationRequest]:
    """Returns requests of many lengths and parameters; so that rows come and go."""
    kinds = (
        SamplingParams(temperature=0.0, max_tokens=9),
        SamplingParams(temperature=0.9, seed=7, max_tokens=14),
        SamplingParams(temperature=1.3, max_tokens=5, top_k=3, repetition_penalty=1.4),
    )
    return [
        GenerationRequest(
            prompt=tuple((7 * i + 3 * j) % 129 for j in range(1 + (5 * i) % 23)),
            sampling=kinds[i % len(kinds)],
        )
        for i in range(count)
    ]
