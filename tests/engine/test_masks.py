"""The mask loop: a row is masked by all that its choice has said, once for each token."""

import dataclasses
import functools
import itertools
import json
from collections.abc import Callable, Sequence
from typing import Any

import llguidance
import pytest

from jaxserve.engine import Delta, Engine, Event
from jaxserve.errors import BadGrammarError, InvalidRequestError, UnsupportedError
from jaxserve.plan import StepPlan, TokenMask
from jaxserve.request import FinishReason, GenerationRequest, SamplingParams, StructuredOutput
from jaxserve.text.constraints import Constraint, Constraints
from jaxserve.text.mask_batch import MIN_TOGETHER
from tests.engines import (
    LIMITS,
    Output,
    Outputs,
    ask,
    build_engine,
    check_idle,
    gather,
    gather_choices,
    serve,
)
from tests.fakes import EOS_ID, VOCAB_SIZE, build_byte_tokenizer, expected_output
from tests.text.masks import fill_mask

PROMPT = (7, 8, 9)
LETTERS = StructuredOutput(kind="regex", text="([ab]c){1,6}d?")
DRAWN: dict[str, Any] = {"temperature": 0.9, "seed": 3, "max_tokens": 20}


def structured(
    form: StructuredOutput = LETTERS,
    prompt: tuple[int, ...] = PROMPT,
    **fields: Any,  # noqa: ANN401
) -> GenerationRequest:
    asked = ask(prompt, **{**DRAWN, **fields})
    return GenerationRequest(prompt=prompt, sampling=asked.sampling, structured_output=form)


@functools.cache
def constraints() -> Constraints:
    return Constraints(build_byte_tokenizer(), eos_ids={EOS_ID}, vocab_size=VOCAB_SIZE)


def alone(
    form: StructuredOutput = LETTERS,
    prompt: tuple[int, ...] = PROMPT,
    *,
    choice: int = 0,
    n: int = 20,
    **fields: Any,  # noqa: ANN401
) -> list[int]:
    """Returns what a choice must say: a new constraint reads all of the output at each token."""
    sampling = SamplingParams(**{**DRAWN, **fields})

    def mask_of(output: tuple[int, ...]) -> TokenMask:
        constraint = constraints().build(sampling, form)
        assert constraint is not None
        constraint.read(output)
        return fill_mask(constraint)

    output = expected_output(
        prompt, sampling, n, seed=3, stop_ids=(EOS_ID,), choice=choice, mask_of=mask_of
    )
    return output[: output.index(EOS_ID) + 1] if EOS_ID in output else output


class Watched:
    """A constraint that counts what it is asked, and may be told to fail."""

    def __init__(self, inner: Constraint, *, fails_at: int | None, fails_in: str) -> None:
        self.inner = inner
        self.seen: list[int] = []
        self.num_masks = 0
        self.fails_at, self.fails_in = fails_at, fails_in
        self.forks: list[Watched] = []

    def fork(self) -> "Watched":
        fork = Watched(self.inner.fork(), fails_at=None, fails_in="")
        self.forks.append(fork)
        return fork

    def _fail(self, where: str) -> None:
        if where == self.fails_in and len(self.seen) == self.fails_at:
            raise BadGrammarError("the grammar cannot be used: too complex; make it simpler")

    def read(self, output: Sequence[int]) -> None:
        if new := output[len(self.seen) :]:
            self.seen += new
            self._fail("read")
        self.inner.read(output)

    @property
    def matcher(self) -> llguidance.LLMatcher | None:
        return self.inner.matcher

    def fill(self, mask_V: TokenMask) -> None:
        if (matcher := self.matcher) is not None:
            matcher.unsafe_compute_mask_ptr(mask_V.ctypes.data, mask_V.nbytes)
        self.finish(mask_V)

    def finish(self, mask_V: TokenMask) -> None:
        self.num_masks += 1
        self._fail("mask")
        self.inner.finish(mask_V)

    def charge(self, seconds: float) -> None:
        self.inner.charge(seconds)


def watch(
    engine: Engine,
    only: StructuredOutput | None = None,
    *,
    fails_at: int | None = None,
    fails_in: str = "",
) -> Callable[[], Watched]:
    """Has the engine use watched constraints, of one form or of all; returns what returns the last
    one built."""
    build = engine._constraints.build
    built: list[Watched] = []

    def watched(
        sampling: SamplingParams, form: StructuredOutput | None
    ) -> Watched | Constraint | None:
        inner = build(sampling, form)
        if inner is None or only not in (None, form):
            return inner
        built.append(Watched(inner, fails_at=fails_at, fails_in=fails_in))
        return built[-1]

    engine._constraints.build = watched  # type: ignore[method-assign, assignment]
    return lambda: built[-1]


@pytest.mark.parametrize("overlap", [True, False])
def test_every_token_is_masked_by_all_before_it_and_read_once(overlap: bool) -> None:
    engine, runner = build_engine(overlap=overlap)
    last = watch(engine)
    with serve(engine, runner):
        output = gather(engine.submit(structured()))
    assert output.token_ids == alone()
    assert len(output.token_ids) > 1
    assert set(output.text) <= set("abcd")
    constraint = last()
    assert constraint.seen == output.token_ids[:-1]  # the one that ends it is not asked about
    num_surplus = engine.metrics.value("surplus_tokens_total")
    assert constraint.num_masks == len(output.token_ids)
    assert num_surplus == (1 if overlap else 0)


@pytest.mark.parametrize("overlap", [True, False])
def test_masked_and_free_rows_run_in_one_step(overlap: bool) -> None:
    engine, runner = build_engine(overlap=overlap, num_pages=40)
    runner.gate.clear()
    free = [
        ask((n, n), temperature=0.9, seed=3, ignore_eos=True, max_tokens=6 + 4 * n) for n in (1, 2)
    ]
    with serve(engine, runner):
        streams = [
            engine.submit(asked)
            for asked in (free[0], structured(), free[1], structured(prompt=(1,)))
        ]
        runner.gate.set()
        outputs = [gather(stream) for stream in streams]
    sampling = SamplingParams(temperature=0.9)
    assert [output.token_ids for output in outputs] == [
        expected_output((1, 1), sampling, 10, seed=3),
        alone(),
        expected_output((2, 2), sampling, 14, seed=3),
        alone(prompt=(1,)),
    ]
    kinds = {
        frozenset(chunk.is_masked for chunk in plan.chunks if chunk.samples)
        for plan in runner.plans
    }
    assert frozenset((True, False)) in kinds
    assert frozenset((False,)) in kinds


@pytest.mark.parametrize("overlap", [True, False])
def test_each_choice_follows_the_form_by_itself(overlap: bool) -> None:
    engine, runner = build_engine(overlap=overlap, num_pages=40)
    last = watch(engine)
    with serve(engine, runner):
        outputs = gather_choices(engine.submit(structured(num_choices=4)))
    assert outputs.token_ids == [alone(choice=choice) for choice in range(4)]
    lengths = [len(token_ids) for token_ids in outputs.token_ids]
    assert len(set(lengths)) > 1, "they should end one after the other"
    for constraint, token_ids in zip((last(), *last().forks), outputs.token_ids, strict=True):
        assert constraint.seen == token_ids[:-1]
        assert constraint.num_masks == len(token_ids), "one that has ended is asked no more"


def run_preempted(preempt_at: int, *, overlap: bool) -> tuple[Outputs, Watched]:
    results = itertools.count(1)
    engine: Engine

    def on_result(_: StepPlan) -> None:
        if next(results) == preempt_at:
            for live in engine._intake.live():
                engine._scheduler.preempt(live.request)

    engine, runner = build_engine(overlap=overlap, num_pages=40, on_result=on_result)
    last = watch(engine)
    with serve(engine, runner):
        outputs = gather_choices(engine.submit(structured(num_choices=3)))
    return outputs, last()


@pytest.mark.parametrize("overlap", [True, False])
def test_a_preemption_neither_repeats_nor_skips_a_token(overlap: bool) -> None:
    wanted = [alone(choice=choice) for choice in range(3)]
    for preempt_at in range(1, max(map(len, wanted)) + 2):
        outputs, constraint = run_preempted(preempt_at, overlap=overlap)
        assert outputs.token_ids == wanted, preempt_at
        for one, token_ids in zip((constraint, *constraint.forks), wanted, strict=True):
            assert one.seen == token_ids[:-1], preempt_at


@pytest.mark.parametrize("overlap", [True, False])
@pytest.mark.parametrize("fails_in", ["read", "mask"])
@pytest.mark.parametrize("fails_at", [0, 1, 3])
def test_a_constraint_that_fails_ends_its_request_alone(
    fails_at: int, fails_in: str, overlap: bool
) -> None:
    if fails_in == "read" and not fails_at:
        fails_at = 2
    mate = ask((4,), temperature=0.9, seed=3, ignore_eos=True)
    form = StructuredOutput(kind="regex", text="[ab]{12}")
    other = StructuredOutput(kind="regex", text="[x-z]{9}")
    limits = dataclasses.replace(LIMITS, max_rows=8, max_seqs=8, max_chunk_tokens=24, max_chunks=4)
    engine, runner = build_engine(overlap=overlap, num_pages=60, step_limits=limits)
    watch(engine, form, fails_at=fails_at, fails_in=fails_in)
    runner.gate.clear()
    with serve(engine, runner):
        first, failing, *others = [
            engine.submit(asked)
            for asked in (mate, structured(form, num_choices=2), structured(), structured(other))
        ]
        runner.gate.set()  # so that masks are filled together
        assert gather(first).token_ids == expected_output(
            (4,), SamplingParams(temperature=0.9), 8, seed=3
        )
        with pytest.raises(BadGrammarError, match="too complex"):
            list(failing)
        assert [gather(stream).token_ids for stream in others] == [alone(), alone(other)]
        assert len(gather(engine.submit(mate)).token_ids) == 8
    assert engine.metrics.value("requests_finished_total", reason="error_bad_grammar") == 1


@pytest.mark.parametrize("fails_in", ["read", "mask"])
def test_constraints_that_fail_in_the_same_step_end_each_their_request(fails_in: str) -> None:
    form = StructuredOutput(kind="regex", text="[ab]{12}")
    limits = dataclasses.replace(LIMITS, max_rows=8, max_seqs=8, max_chunk_tokens=24, max_chunks=4)
    engine, runner = build_engine(num_pages=60, step_limits=limits)
    watch(engine, form, fails_at=2, fails_in=fails_in)
    runner.gate.clear()
    with serve(engine, runner):
        *failing, other = [engine.submit(structured(f)) for f in (form, form, form, LETTERS)]
        runner.gate.set()  # so that they run side by side
        for stream in failing:
            seen: list[Event] = []
            with pytest.raises(BadGrammarError, match="too complex"):
                seen.extend(stream)
            assert sum(len(event.token_ids) for event in seen if isinstance(event, Delta)) == 2
        assert gather(other).token_ids == alone()
    assert engine.metrics.value("requests_finished_total", reason="error_bad_grammar") == 3


def test_a_step_that_was_launched_for_a_choice_that_has_ended_masks_nothing_of_it() -> None:
    engine, runner = build_engine(overlap=True)
    last = watch(engine)
    form = StructuredOutput(kind="choice", choices=("ab",))
    with serve(engine, runner):
        output = gather(engine.submit(structured(form)))
    assert output.text == "ab"
    assert output.finished.reason is FinishReason.EOS
    assert last().num_masks == 3  # a, b and the end; a fourth step was in flight
    assert engine.metrics.value("surplus_tokens_total") == 1


def run_cancelled(form: StructuredOutput, step: int) -> Output:
    engine: Engine

    def on_launch(plan: StepPlan) -> None:
        if plan.step_id == step:
            engine.abort("r")

    engine, runner = build_engine(on_launch=on_launch)
    with serve(engine, runner):
        return gather(engine.submit(dataclasses.replace(structured(form), id="r")))


def test_a_cancel_between_launch_and_mask_is_harmless() -> None:
    form = StructuredOutput(kind="regex", text="[ab]{9}")
    whole = alone(form)
    for step in range(1, 12):
        output = run_cancelled(form, step)
        assert output.token_ids == whole[: len(output.token_ids)]
        is_whole = len(output.token_ids) == len(whole)
        wanted = FinishReason.EOS if is_whole else FinishReason.CANCELLED
        assert output.finished.reason is wanted


def test_bad_words_and_allowed_ids_are_masks_too() -> None:
    engine, runner = build_engine()
    allowed = tuple(b"abcdef")
    with serve(engine, runner):
        output = gather(
            engine.submit(
                ask(
                    PROMPT, temperature=0.9, seed=3, max_tokens=30,
                    allowed_token_ids=allowed, bad_words=("ab", "c"),
                )
            )
        )  # fmt: skip
    assert set(output.token_ids) <= {*allowed, EOS_ID}
    assert "ab" not in output.text
    assert "c" not in output.text


def test_a_json_schema_gives_json_of_it() -> None:
    schema = {
        "type": "object",
        "properties": {"name": {"enum": ["Ann", "Bob"]}, "age": {"enum": [7, 8]}},
        "required": ["name", "age"],
        "additionalProperties": False,
    }
    engine, runner = build_engine(max_model_tokens=200, num_pages=200)
    form = StructuredOutput(kind="json_schema", text=json.dumps(schema))
    with serve(engine, runner):
        outputs = gather_choices(engine.submit(structured(form, max_tokens=190, num_choices=4)))
    for choice in outputs.choices:
        assert choice.reason is FinishReason.EOS
        found = json.loads(choice.text)
        assert found["name"] in ("Ann", "Bob")
        assert found["age"] in (7, 8)


def test_a_wrong_grammar_is_refused_at_the_door_and_the_engine_never_sees_it() -> None:
    engine, runner = build_engine()
    with serve(engine, runner):
        with pytest.raises(BadGrammarError) as found:
            engine.submit(structured(StructuredOutput(kind="regex", text="(")))
        assert found.value.field == "structured_output.regex"
        assert gather(engine.submit(structured())).token_ids == alone()
    assert engine.metrics.value("requests_refused_total", reason="bad_grammar") == 1
    assert engine.metrics.value("requests_submitted_total") == 1


@pytest.mark.parametrize(("name", "value"), [("ignore_eos", True), ("min_tokens", 1)])
def test_what_keeps_a_form_from_ending_is_refused_by_name(name: str, value: Any) -> None:  # noqa: ANN401
    engine, runner = build_engine()
    with serve(engine, runner):
        with pytest.raises(UnsupportedError, match=f"^{name} does not go with") as found:
            engine.submit(structured(**{name: value}))
    assert found.value.field == f"stop.{name}"


FORMS: list[tuple[Any, str]] = [
    ("json", "structured_output"),
    (StructuredOutput(kind="xml", text="x"), "structured_output"),  # type: ignore[arg-type]
    (StructuredOutput(kind="regex"), "structured_output.regex"),
    (StructuredOutput(kind="regex", text="a", choices=("a",)), "structured_output.regex"),
    (StructuredOutput(kind="regex", text=5), "structured_output.regex"),  # type: ignore[arg-type]
    (StructuredOutput(kind="json_object", text="{}"), "structured_output.json_object"),
    (StructuredOutput(kind="choice"), "structured_output.choice"),
    (StructuredOutput(kind="choice", choices=("a", "")), "structured_output.choice"),
    (StructuredOutput(kind="choice", choices="ab"), "structured_output.choice"),  # type: ignore[arg-type]
    (StructuredOutput(kind="choice", choices=(1,)), "structured_output.choice"),  # type: ignore[arg-type]
    (StructuredOutput(kind="lark", text="a" * (64 << 10) + "a"), "structured_output.lark_grammar"),
    (StructuredOutput(kind="regex", text="\ud800"), "structured_output.regex"),
]  # fmt: skip


@pytest.mark.parametrize(("form", "field"), FORMS)
def test_what_is_no_form_is_refused_by_name(form: Any, field: str) -> None:  # noqa: ANN401
    engine, runner = build_engine()
    with serve(engine, runner):
        with pytest.raises(InvalidRequestError) as found:
            engine.submit(structured(form))
    assert found.value.field == field
    assert len(str(found.value)) < 250


def test_many_masked_choices_are_each_as_alone_and_masked_together() -> None:
    engine, runner = build_engine(num_pages=80)
    prompts = [(n, 5) for n in range(1, 7)]
    runner.gate.clear()
    with serve(engine, runner):
        streams = [engine.submit(structured(prompt=prompt)) for prompt in prompts]
        runner.gate.set()
        outputs = [gather(stream) for stream in streams]
    assert [output.token_ids for output in outputs] == [alone(prompt=p) for p in prompts]
    assert engine.metrics.value("batched_masks_total") >= MIN_TOGETHER
    assert engine.metrics.value("decode_table_tokens_total") > 0
    check_idle(engine)
