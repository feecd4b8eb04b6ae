"""The small engine E0 of the fault cases on the real runner, its requests moved step by step.

Four rows, twelve pages of four, ten tokens a step: rows and pages run out all the time. What a
request must get is worked out apart, in float64: the oracle's logits and the reference's sampler.
"""

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence

import jax
import numpy as np
from jax import numpy as jnp

from jaxserve.config import Config, PrefixCacheSection
from jaxserve.engine import Stream
from jaxserve.model.params import Params
from jaxserve.request import GenerationRequest, Request, SamplingParams, SequenceState
from jaxserve.runner.lowering import head_params
from jaxserve.runner.runner import Runner
from jaxserve.text.constraints import Constraint, Constraints
from tests.differential.stage import EOS_ID, MODEL, build_engine, tiny_params
from tests.engines import Output, Outputs, check_idle, gather, gather_choices
from tests.fakes import build_byte_tokenizer
from tests.model.reference_sampler import Row, reference_token
from tests.oracle import oracle_logits
from tests.text.masks import fill_mask

NUM_ROWS = 4
MAX_MODEL_TOKENS = 40
CONFIG = Config.model_validate(
    {
        "model": {"dtype": "float32", "max_model_tokens": MAX_MODEL_TOKENS},
        "kv": {"page_size": 4, "num_pages": 1 + 12},
        "scheduler": {"max_seqs": NUM_ROWS, "max_step_tokens": 10, "max_chunks": 2},
        "buckets": {
            "decode_seqs": (2, 4),
            "chunk_tokens": (6, 10),
            "chunk_decode_seqs": (4,),
            "chunk_tile": 2,
        },
        "limits": {"max_logit_bias": 4, "max_stop_token_ids": 4},
    }
)


def ask(prompt: Sequence[int], **sampling: object) -> GenerationRequest:
    """Returns a request for 16 tokens that no EOS ends, unless told otherwise."""
    fields = {"temperature": 0.0, "max_tokens": 16, "ignore_eos": True, **sampling}
    return GenerationRequest(prompt=tuple(prompt), sampling=SamplingParams(**fields))  # type: ignore[arg-type]  # by name


def prompt_of(length: int, *, salt: int = 0) -> tuple[int, ...]:
    return tuple(np.random.default_rng([length, salt]).integers(0, 127, length).tolist())


@dataclasses.dataclass(slots=True, eq=False, kw_only=True)
class Guest:
    """A request in the engine, at which output lengths it is to be preempted, and where it was."""

    request: Request
    stream: Stream
    preempt_at: list[int]
    preempted_at: list[int] = dataclasses.field(default_factory=list)

    @property
    def output(self) -> list[int]:
        return self.request.sequences[0].output if self.request.sequences else []

    @property
    def num_preemptions(self) -> int:
        return self.request.sequences[0].num_preemptions

    @property
    def is_running(self) -> bool:
        sequences = self.request.sequences
        return bool(sequences) and sequences[0].state is SequenceState.RUNNING

    @property
    def has_ended(self) -> bool:
        sequences = self.request.sequences
        return bool(sequences) and sequences[0].state is SequenceState.FINISHED


class Play:
    """One engine and its guests. The runner is shared: rows and pages hold what others left."""

    def __init__(
        self,
        runner: Runner,
        *,
        overlap: bool = True,
        config: Config = CONFIG,
        changing_ropes: tuple[tuple[str, int], ...] = (),
    ) -> None:
        section = config.runner.model_copy(update={"overlap": overlap})
        self.engine = build_engine(
            runner,
            config.model_copy(update={"runner": section}),
            changing_ropes=changing_ropes,
        )
        self.runner = runner
        self.guests: list[Guest] = []
        self.num_steps = 0

    def submit(self, asked: GenerationRequest, *, preempt_at: Sequence[int] = ()) -> Guest:
        stream = self.engine.submit(asked)
        live = self.engine._intake.find(stream.request_id, asked.tenant)
        assert live is not None
        guest = Guest(request=live.request, stream=stream, preempt_at=list(preempt_at))
        self.guests.append(guest)
        return guest

    @property
    def has_work(self) -> bool:
        return bool(self.engine._intake.live() or self.engine._loop._in_flight)

    def step(self) -> None:
        for guest in self.guests:
            due = guest.preempt_at
            if due and guest.is_running and len(guest.output) >= due[0]:
                del due[0]
                guest.preempted_at.append(len(guest.output))
                self.engine._scheduler.preempt(guest.request)
        self.engine._loop.step()
        self.engine._scheduler.check()
        self.num_steps += 1
        assert self.num_steps < 20_000, "stuck"

    def run(self, on_step: Callable[[], None] = lambda: None) -> None:
        """Steps until everybody has ended and all is given back."""
        while self.has_work:
            on_step()
            self.step()
        check_idle(self.engine)

    def read_choices(self, guest: Guest) -> Outputs:
        assert guest.preempt_at == [], "it ended before it was preempted"
        return gather_choices(guest.stream)

    def read(self, guest: Guest) -> Output:
        output = gather(guest.stream)
        assert guest.preempt_at == [], "it ended before it was preempted"
        return output


def run_all(
    runner: Runner,
    asked: Sequence[GenerationRequest],
    *,
    preempt_at: Sequence[Sequence[int]] = (),
    overlap: bool = True,
    max_at_once: int = 1000,
    cache: PrefixCacheSection = CONFIG.prefix_cache,
) -> list[Output]:
    """Runs all to the end, and returns the outputs in the same order.

    Where few enough run at once for the pages, each is first preempted exactly where it is to be.
    """
    play = Play(runner, overlap=overlap, config=CONFIG.model_copy(update={"prefix_cache": cache}))
    points = preempt_at or [()] * len(asked)
    guests: list[Guest] = []
    for request, at in zip(asked, points, strict=True):
        while len(play.engine._intake.live()) >= max_at_once:
            play.step()
        guests.append(play.submit(request, preempt_at=at))
    play.run()
    for guest, at in zip(guests, points, strict=True):
        assert max_at_once > 2 or guest.preempted_at[:1] == list(at[:1])
    return [play.read(guest) for guest in guests]


@functools.cache
def oracle_constraints() -> Constraints:
    return Constraints(
        build_byte_tokenizer(),
        eos_ids={EOS_ID},
        vocab_size=MODEL.vocab_size,
    )


def _masked(logits_V: np.ndarray, constraint: Constraint | None) -> np.ndarray:
    if constraint is None:
        return logits_V
    bits = np.unpackbits(fill_mask(constraint).view(np.uint8), bitorder="little")
    return np.where(bits[: len(logits_V)] == 1, logits_V, -np.inf)


def oracle_logprobs(tokens: Sequence[int], params: Params | None = None) -> np.ndarray:
    """Returns the log-softmax after each of the tokens, in float64."""
    logits_TV = oracle_logits(params or tiny_params(), list(tokens), MODEL).astype(np.float64)
    logits_TV = logits_TV - logits_TV.max(axis=1, keepdims=True)
    result: np.ndarray = logits_TV - np.log(np.exp(logits_TV).sum(axis=1, keepdims=True))
    return result


def oracle_output(
    asked: GenerationRequest, params: Params | None = None, *, choice: int = 0
) -> list[int]:
    """Returns the tokens of a choice alone, up to its end by an id or by max_tokens."""
    sampling = asked.sampling
    constraint = oracle_constraints().build(sampling, asked.structured_output)
    assert isinstance(asked.prompt, tuple)
    assert sampling.max_tokens is not None
    ends = {*sampling.stop_token_ids, *(() if sampling.ignore_eos else (EOS_ID,))}
    output: list[int] = []
    while len(output) < sampling.max_tokens:
        logits_V = oracle_logits(params or tiny_params(), [*asked.prompt, *output], MODEL)[-1]
        row = Row(
            seed=sampling.seed or 0,
            choice=choice,
            output_index=len(output),
            temperature=sampling.temperature,
            top_k=sampling.top_k,
            top_p=sampling.top_p,
            min_p=sampling.min_p,
            presence=sampling.presence_penalty,
            frequency=sampling.frequency_penalty,
            repetition=sampling.repetition_penalty,
            bias=tuple(sampling.logit_bias.items()),
            bans=tuple(ends),
            min_tokens=sampling.min_tokens,
            prompt=asked.prompt,
            output=tuple(output),
        )
        output.append(reference_token(_masked(logits_V, constraint), row))
        if output[-1] in ends and len(output) > sampling.min_tokens:
            break
        if constraint is not None:
            constraint.read(output)
    return output


def constant_params(logits: Mapping[int, float], *, rest: float) -> Params:
    """Returns parameters with which every token's logits are these, whatever came before.

    The layers add nothing to an embedding of ones, so the head alone speaks. Its padding rows stay
    zero: a padding id has the logit 0.
    """
    params: Params = jax.tree.map(np.array, tiny_params())
    for layer in params["layers"].values():
        layer["o_NHD"][:] = 0
        layer["down_FD"][:] = 0
    params["embedding_VD"][:] = 1
    params["final_norm_D"][:] = 1
    wanted_V = np.full(MODEL.vocab_size, rest)
    wanted_V[list(logits)] = list(logits.values())
    params["head_VD"][: MODEL.vocab_size] = wanted_V[:, None] / MODEL.hidden_size
    return params


def set_params(runner: Runner, params: Params) -> None:
    """Swaps the parameters of a compiled runner; programs do not hold them."""
    runner._params = jax.tree.map(jnp.asarray, params)
    runner._head = head_params(runner._params)


def bucket_steps(runner: Runner) -> dict[str, float]:
    """Returns how many steps each forward bucket has run."""
    metrics = runner._metrics
    from_name = (f"{b.decode_seqs}x1+{b.chunk_tokens}" for b in runner._scheme.forwards)
    return {name: metrics.value("steps_total", bucket=name) for name in from_name}
