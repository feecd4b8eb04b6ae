"""With runner.batch_invariant a token's numbers are a function of the tokens up to it: every bit.

Sequences run in random schedules: other rows, chunks, mates, pages, preemptions. Each token's
hidden state, each row of logits and each log-probability that comes back must be the same bits as
whenever the same tokens stood before it.
"""

import dataclasses
import random

import jax
import numpy as np
import pytest

from jaxserve.config import Config
from jaxserve.kernels.paged_attention import launch
from jaxserve.metrics import Metrics
from jaxserve.model.params import Params, init_params
from jaxserve.model.transformer import logits
from jaxserve.request import SamplingParams
from jaxserve.runner.runner import Runner
from tests.runner.driver import CONFIG, MODEL, Driver, Row, oracle_tokens, prompt_of, tiny_params

# Sizes that native kernels take, too; products of 96 and 160 rows are cut otherwise than of 2.
WIDE = dataclasses.replace(
    MODEL, hidden_size=96, num_heads=4, num_kv_heads=2, head_dim=16, mlp_size=160
)
TILE = CONFIG.buckets.chunk_tile
PROMPT_LENS = (13, 7, 22)
NUM_TOKENS = 6
NUM_SCHEDULES = 6
MATE_SAMPLING = (
    SamplingParams(temperature=0.0),
    SamplingParams(temperature=0.8, seed=4),
    SamplingParams(temperature=1.1, seed=9, top_p=0.9, top_k=20, repetition_penalty=1.3),
)
KINDS = [
    pytest.param(("xla", "xla", "float32", "auto"), id="xla-float32"),
    pytest.param(("xla", "xla", "bfloat16", "auto"), id="xla-bfloat16"),
    pytest.param(("xla", "xla", "float32", "int8"), id="xla-float32-int8"),
    pytest.param(("xla", "xla", "bfloat16", "float8_e4m3fn"), id="xla-bfloat16-float8"),
    pytest.param(("reference", "xla", "float32", "auto"), id="reference-float32"),
    pytest.param(("triton", "xla", "float32", "auto"), id="triton-float32"),
    pytest.param(("triton", "xla", "bfloat16", "int8"), id="triton-bfloat16-int8"),
    pytest.param(
        ("native", "xla", "float32", "auto"), id="native-float32", marks=pytest.mark.native
    ),
    pytest.param(
        ("native", "native", "bfloat16", "auto"), id="native-bfloat16", marks=pytest.mark.native
    ),
    pytest.param(
        ("native", "native", "bfloat16", "int8"),
        id="native-bfloat16-int8",
        marks=pytest.mark.native,
    ),
    pytest.param(
        ("native", "xla", "float32", "float8_e4m3fn"),
        id="native-float32-float8",
        marks=pytest.mark.native,
    ),
]

head_logits = jax.jit(logits, static_argnames=("config", "matmul"))


def config_of(attention: str, matmul: str, dtype: str, kv_dtype: str = "auto") -> Config:
    values = CONFIG.model_dump()
    values["model"]["dtype"], values["kv"]["dtype"] = dtype, kv_dtype
    values["runner"] |= {"attention": attention, "matmul": matmul, "batch_invariant": True}
    return Config.model_validate(values)


@pytest.fixture(params=KINDS, scope="module")
def invariant(request: pytest.FixtureRequest) -> Runner:
    params = init_params(WIDE, jax.random.key(0), request.param[2])
    with pytest.MonkeyPatch.context() as patch:
        # Two shares of the longest row; Triton's block of one-byte numbers is as long as that row.
        is_long = request.param == ("triton", "xla", "bfloat16", "int8")
        patch.setattr(launch, "SPLIT_LEN", 64 if is_long else 32)
        return Runner(params, WIDE, config_of(*request.param), metrics=Metrics())


@dataclasses.dataclass(slots=True, eq=False)
class Book:
    """The bits of what was computed, by the tokens they may depend on."""

    bits: dict[tuple[str, tuple[int | None, ...]], object] = dataclasses.field(default_factory=dict)
    num_compared: int = 0
    different: set[tuple[str, tuple[int | None, ...]]] = dataclasses.field(default_factory=set)

    def compare(self, kind: str, tokens: tuple[int | None, ...], bits: object) -> None:
        key = (kind, tokens)
        self.num_compared += key in self.bits
        if self.bits.setdefault(key, bits) != bits:
            self.different.add(key)


class Schedule:
    """Runs the targets once, in an order of its own."""

    def __init__(self, runner: Runner, book: Book, seed: int) -> None:
        self._rng = random.Random(seed)
        self._driver = Driver(runner, first_page=self._rng.randrange(100))
        self._book = book
        (self._bucket,) = runner._scheme.forwards
        rows = self._rng.sample(range(9), 9)
        self.targets = [self._driver.row(rows.pop(), prompt_of(length)) for length in PROMPT_LENS]
        for target in self.targets:
            target.num_top = 3
        self._mates = [
            self._driver.row(
                rows.pop(),
                prompt_of(self._rng.randrange(1, 12), salt=self._rng.randrange(1 << 30)),
                sampling=self._rng.choice(MATE_SAMPLING),
            )
            for _ in range(self._rng.choice((0, 1, 6)))
        ]

    def run(self) -> None:
        num_preempted = 0
        while any(len(target.output) < NUM_TOKENS for target in self.targets):
            if self._rng.random() < 0.1 and num_preempted < 3:
                self._driver.preempt(self._rng.choice(self.targets))
                num_preempted += 1
            if work := self._draw_work():
                self._step(work)
        for target in self.targets:
            for index, told in enumerate(target.logprobs):
                tokens = target.tokens[: len(target.prompt) + index]
                self._book.compare("logprobs", tuple(tokens), told)

    def _draw_work(self) -> list[tuple[Row, int]]:
        singles: list[tuple[Row, int]] = []
        chunks: list[tuple[Row, int]] = []
        room = self._bucket.chunk_tokens
        everybody = [*self.targets, *self._mates]
        for row in self._rng.sample(everybody, self._rng.randint(1, len(everybody))):
            owed = len(row.tokens) - row.num_computed
            if len(row.output) >= NUM_TOKENS:
                continue
            num_tokens = self._rng.randint(1, min(owed, room)) if room else 1
            if num_tokens == 1:
                singles.append((row, 1))
            elif len(chunks) < 3:
                chunks.append((row, num_tokens))
                room -= -(-num_tokens // TILE) * TILE
        return [*singles, *chunks]

    def _step(self, work: list[tuple[Row, int]]) -> None:
        starts = [row.num_computed for row, _ in work]
        runner = self._driver.runner
        self._driver.step(*work)
        hidden_TD = np.array(runner._hidden_TD)
        next_single, next_tile = 0, self._bucket.decode_seqs
        last: list[tuple[int, tuple[int | None, ...]]] = []
        for (row, num_tokens), start in zip(work, starts, strict=True):
            place = next_single if num_tokens == 1 else next_tile
            if num_tokens == 1:
                next_single += 1
            else:
                next_tile += -(-num_tokens // TILE) * TILE
            for i in range(num_tokens):
                tokens = tuple(row.tokens[: start + i + 1])
                self._book.compare("hidden", tokens, hidden_TD[place + i].tobytes())
            last.append((place + num_tokens - 1, tokens))
        self._compare_logits(hidden_TD, last)

    def _compare_logits(
        self, hidden_TD: np.ndarray, last: list[tuple[int, tuple[int | None, ...]]]
    ) -> None:
        """Compares the head's rows, each at a place of its own among others."""
        runner = self._driver.runner
        (output,) = runner._scheme.outputs
        index = [self._rng.randrange(len(hidden_TD)) for _ in range(output.rows)]
        places = self._rng.sample(range(output.rows), min(len(last), output.rows))
        for place, (hidden_index, _) in zip(places, last, strict=False):
            index[place] = hidden_index
        out_RV = head_logits(
            runner._head,
            jax.device_put(hidden_TD[index]),
            config=WIDE,
            matmul=runner.spec.kernels.matmul,
        )
        for place, (_, tokens) in zip(places, last, strict=False):
            self._book.compare("logits", tokens, np.array(out_RV[place]).tobytes())


def test_every_bit_is_a_function_of_the_tokens_before_it(invariant: Runner) -> None:
    book = Book()
    outputs = set()
    for seed in range(NUM_SCHEDULES):
        schedule = Schedule(invariant, book, seed)
        schedule.run()
        outputs.add(tuple(tuple(target.output[:NUM_TOKENS]) for target in schedule.targets))
    assert len(outputs) == 1
    assert book.num_compared > 300
    assert not book.different, sorted({kind for kind, _ in book.different})
    steps = invariant._metrics.total("steps_total")
    assert invariant._metrics.total("batch_invariant_steps_total") == steps
    assert invariant._metrics.total("bucketed_steps_total") == 0


def test_there_is_one_shape_of_each_kind(invariant: Runner) -> None:
    (forward,) = invariant._scheme.forwards
    (output,) = invariant._scheme.outputs
    assert (forward.name, output.rows, output.variant) == ("9x1+24", 9, "full")
    assert invariant.spec.kernels.split_len in (32, 64)  # as the fixture has it


def test_the_tokens_are_those_of_the_oracle() -> None:
    params: Params = tiny_params()
    runner = Runner(params, MODEL, config_of("xla", "xla", "float32"), metrics=Metrics())
    driver = Driver(runner)
    rows = [driver.row(n, prompt_of(length)) for n, length in enumerate(PROMPT_LENS)]
    driver.generate(*rows, num_tokens=NUM_TOKENS, chunk_len=9)
    for row in rows:
        assert row.output[:NUM_TOKENS] == oracle_tokens(params, row.prompt, NUM_TOKENS)


@pytest.mark.parametrize(
    ("num_tokens", "split_len"), [(16, 512), (512 * 32, 512), (512 * 32 + 1, 1024)]
)
def test_the_one_length_of_splits_leaves_32_at_most(num_tokens: int, split_len: int) -> None:
    assert launch.find_split_len(num_tokens) == split_len
    assert -(-num_tokens // split_len) <= launch.MAX_SPLITS
