"""Grammars from strangers: what they may cost, and that nothing of it reaches others."""

import gc
import json
import random
import subprocess
import threading
import time
from collections.abc import Iterator
from string import ascii_lowercase

import llguidance
import pytest

from jaxserve.errors import BadGrammarError, CapacityError, QueueFullError
from jaxserve.request import SamplingParams, StructuredOutput
from jaxserve.text import (
    grammar,
    grammar_compiler,
    grammar_engine,
    grammar_trial,
    grammar_trial_child,
)
from jaxserve.text.constraints import Constraints
from jaxserve.text.grammar_compiler import GrammarCompiler
from jaxserve.text.grammar_source import build_source
from jaxserve.text.grammar_trial import Trial
from jaxserve.text.grammar_vocabulary import build_vocabulary
from jaxserve.text.mask_batch import MaskBatch
from tests.text.masks import allowed, build_constraints, open_constraint, read_ids
from tests.text.vocabularies import byte_tokenizer

TOKENIZER = byte_tokenizer()
VOCABULARY = build_vocabulary(TOKENIZER, eos_ids=TOKENIZER.eos_ids, vocab_size=267)
GOOD = StructuredOutput(kind="regex", text="ok")


@pytest.fixture(scope="module")
def constraints() -> Constraints:
    return build_constraints(TOKENIZER)


@pytest.fixture(autouse=True)
def patience(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a busy machine too, a grammar ends by what it costs and not by the time."""
    monkeypatch.setattr(grammar_trial, "MAX_TRIAL_S", 60.0)


@pytest.fixture
def compiler() -> Iterator[GrammarCompiler]:
    compiler = GrammarCompiler(VOCABULARY)
    yield compiler
    compiler.close()


def lark(text: str) -> StructuredOutput:
    return StructuredOutput(kind="lark", text=text)


def regex(text: str) -> StructuredOutput:
    return StructuredOutput(kind="regex", text=text)


def schema(value: object) -> StructuredOutput:
    return StructuredOutput(kind="json_schema", text=json.dumps(value))


def source_of(text: str) -> str:
    return build_source(regex(text), max_bytes=1000)


def chain(template: str, num: int) -> str:
    return "\n".join(template.format(i, i + 1) for i in range(num))


def references(num: int) -> dict[str, object]:
    links = {f"a{i}": {"$ref": f"#/$defs/a{i + 1}"} for i in range(num)}
    return {"$ref": "#/$defs/a0", "$defs": {**links, f"a{num}": {"type": "string"}}}


# Each is at most 64 KiB. Without the trial, the first three overflow an ordinary thread's stack.
KILLERS = {
    "chain of rules": lark("start: a0\n" + chain("a{}: a{}", 4500) + '\na4500: "x"'),
    "chain of terminals": lark("start: A0\n" + chain('A{}: A{} "x"', 3500) + '\nA3500: "x"'),
    "chain of references": schema(references(1500)),
    "gigabytes": regex("a?" * 9000),
}


@pytest.mark.parametrize("name", KILLERS)
def test_a_grammar_that_kills_its_process_is_refused_and_others_are_served(
    constraints: Constraints, name: str
) -> None:
    with pytest.raises(BadGrammarError, match="nested too deeply, or takes too much memory"):
        constraints.build(SamplingParams(), KILLERS[name])
    new = regex(f"ok after {name}")
    assert allowed(open_constraint(constraints, new)) == {TOKENIZER.encode("o")[0]}


def test_a_grammar_that_takes_too_long_is_refused(
    constraints: Constraints, monkeypatch: pytest.MonkeyPatch
) -> None:
    open_constraint(constraints, regex("up and running"))
    monkeypatch.setattr(grammar_trial, "MAX_TRIAL_S", 0.3)
    endless = schema({"type": "integer", "multipleOf": 999983})
    with pytest.raises(BadGrammarError, match=r"is not compiled after 0\.3 s; make it simpler"):
        constraints.build(SamplingParams(), endless)


def products() -> dict[str, object]:
    sides = [
        [{"properties": {f"k{i}_{j}": {"type": "string"}}} for j in range(5)] for i in range(10)
    ]
    return {"allOf": [{"anyOf": side} for side in sides]}


@pytest.mark.parametrize(
    "form",
    [
        regex("a?" * 30_000),
        schema(products()),
        lark("start: A0\n" + chain("A{0}: A{1} A{1}", 60) + '\nA60: "x"'),
        lark('start: A\nA: %regex {"substring_chars": "' + "abc" * 10_000 + '"}'),
        lark("start: A\nA: " + " & ".join(f"/.*{letter}.*/" for letter in ascii_lowercase)),
    ],
    ids=["optional", "products", "doubling", "substrings", "all of"],
)
def test_a_grammar_that_counts_as_too_complex_is_refused(
    constraints: Constraints, form: StructuredOutput
) -> None:
    with pytest.raises(BadGrammarError, match=r"it is too complex \(.*\); make it simpler"):
        constraints.build(SamplingParams(), form)


def test_repeats_without_number_cost_nothing(constraints: Constraints) -> None:
    for text in ("a{1000000000}", "(((a{100}){100}){100}){100}", "(a?){30000}b"):
        constraint = open_constraint(constraints, regex(text))
        read_ids(constraint, [TOKENIZER.encode("a")[0]] * 20)


def test_random_text_is_a_grammar_or_refused(constraints: Constraints) -> None:
    rng = random.Random(6)
    pieces = [
        *'abc019 \n\t/\\"{}[]()|*+?.^$#:,;-~&@%<>=_é\u0000\U0001f600',
        *("start: ", "A: ", "a", "\n", '"x"', "/x/", "%json {}", "%ignore ", "%import common.INT"),
        *('{"type": "object"', '"properties": {', '"$ref": "#"', "}", "]", "1e999", "null", "true"),
        *("(?i)", "\\p{L}", "\\d", "{2,", "<[1]>", "<|im_end|>", "%llguidance {", "a::0", "%if "),
    ]  # fmt: skip
    num_usable = 0
    for _ in range(150):
        text = "".join(rng.choices(pieces, k=rng.randrange(1, 25)))
        for form in (
            regex(text),
            lark(f"start: {text}"),
            StructuredOutput(kind="json_schema", text=f"{{{text}}}"),
        ):
            try:
                constraint = open_constraint(constraints, form)
            except BadGrammarError:
                continue
            num_usable += 1
            assert allowed(constraint)
    assert num_usable > 20


def test_one_grammar_is_compiled_once(
    compiler: GrammarCompiler, monkeypatch: pytest.MonkeyPatch
) -> None:
    tried: list[str] = []
    run = Trial.run

    def count(self: Trial, source: str, *, field: str) -> str:
        tried.append(source)
        return run(self, source, field=field)

    monkeypatch.setattr(Trial, "run", count)
    source = source_of("a+")
    threads = [
        threading.Thread(target=compiler.compile, args=(source,), kwargs={"field": ""})
        for _ in range(8)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert tried == [source]
    assert compiler.compile(source, field="").is_shared
    compiler.forget(source)
    assert not compiler.compile(source, field="").is_shared
    assert tried == [source, source]


def test_what_was_refused_is_not_tried_again(
    compiler: GrammarCompiler, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(BadGrammarError, match="unclosed group") as first:
        compiler.compile(source_of("(a"), field="one")
    monkeypatch.setattr(Trial, "run", lambda *_, **__: pytest.fail("tried again"))
    with pytest.raises(BadGrammarError, match="unclosed group") as second:
        compiler.compile(source_of("(a"), field="two")
    assert (first.value.field, second.value.field) == ("one", "two")


def test_the_longest_unused_grammars_are_dropped(
    compiler: GrammarCompiler, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(grammar_compiler, "CACHE_ENTRIES", 3)
    for text in "abc":
        compiler.compile(source_of(text), field="")
    compiler.compile(source_of("a"), field="")
    compiler.compile(source_of("d"), field="")
    assert len(compiler._kept) == 3
    assert [compiler.compile(source_of(text), field="").is_shared for text in "adcb"] == [
        True, True, True, False,
    ]  # fmt: skip
    monkeypatch.setattr(grammar_compiler, "CACHE_BYTES", 100)
    compiler.compile(source_of("e" * 80), field="")
    assert len(compiler._kept) == 1


def test_who_waits_too_long_is_told_to_come_again(
    compiler: GrammarCompiler, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(grammar_compiler, "MAX_WAIT_S", 0.01)
    kept = compiler.compile(source_of("a"), field="")
    with compiler._compiling, pytest.raises(QueueFullError, match="busy compiling") as caught:
        compiler.compile(source_of("b"), field="")
    assert caught.value.retry_after_s > 0
    assert compiler.compile(source_of("a"), field="").matcher is kept.matcher


def test_a_system_without_threads_is_a_full_queue(
    compiler: GrammarCompiler, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(self: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", refuse)
    before = threading.stack_size()
    with pytest.raises(QueueFullError, match="can't start new thread"):
        compiler.compile(source_of("a"), field="")
    assert threading.stack_size() == before


def test_a_compiler_that_breaks_refuses_the_grammar(
    compiler: GrammarCompiler, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(grammar_compiler, "open_matcher", lambda *_: 1 // 0)
    monkeypatch.setattr(threading, "excepthook", lambda _: None)
    with pytest.raises(BadGrammarError, match="breaks its compiler") as caught:
        compiler.compile(source_of("a"), field="the field")
    assert caught.value.field == "the field"


def test_closing_ends_the_process_and_a_new_grammar_begins_another() -> None:
    constraints = build_constraints(TOKENIZER)
    constraints.close()  # nothing to end
    open_constraint(constraints, GOOD)
    compiler = constraints._compiler
    assert compiler is not None
    process = compiler._trial._process
    assert process is not None
    constraints.close()
    assert process.returncode is not None
    open_constraint(constraints, regex("another"))
    constraints.close()


def test_a_compile_has_a_large_stack_and_other_threads_keep_theirs(
    compiler: GrammarCompiler, monkeypatch: pytest.MonkeyPatch
) -> None:
    events: list[object] = []
    begin, set_size = threading.Thread.start, threading.stack_size

    def note_size(size: int = 0) -> int:
        events.append(size)
        return set_size(size)

    def start(self: threading.Thread) -> None:
        events.append(self.name)
        begin(self)

    monkeypatch.setattr(threading, "stack_size", note_size)
    monkeypatch.setattr(threading.Thread, "start", start)
    compiler.compile(source_of("a"), field="")
    assert events == [grammar_compiler.STACK_BYTES, "jaxserve-grammar", 0]
    assert grammar_compiler.STACK_BYTES >= 4 * grammar_trial_child.STACK_BYTES


def test_the_process_ends_with_its_owner() -> None:
    trial = Trial(VOCABULARY)
    assert trial.run(source_of("a"), field="") == ""
    process = trial._process
    assert process is not None
    assert process.poll() is None
    del trial
    gc.collect()
    assert process.returncode is not None


def test_the_process_ends_when_nobody_can_ask_it_any_more() -> None:
    trial = Trial(VOCABULARY)
    trial.run(source_of("a"), field="")
    process = trial._process
    assert process is not None
    assert process.stdin is not None
    process.stdin.close()  # as if its parent had been killed
    assert process.wait(30) == 0
    assert trial.run(source_of("b"), field="") == ""  # another one
    trial.close()


def test_a_process_that_does_not_start_is_a_fault_of_the_server(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(grammar_trial, "_COMMAND", ("false",))
    with pytest.raises(CapacityError, match="does not start"):
        Trial(VOCABULARY).run(source_of("a"), field="")


def small_lexers(monkeypatch: pytest.MonkeyPatch, num_states: int) -> None:
    limits = llguidance.LLParserLimits(max_lexer_states=num_states, verbose_errors=False)
    monkeypatch.setattr(grammar_engine, "LIMITS", limits)


def counted(letter: str) -> str:
    """Its end makes each letter's states its own."""
    return f"{letter}[a-z]{{30}}{letter.upper()}"


def write_counted(letter: str) -> list[int]:
    return TOKENIZER.encode(letter + "q" * 30 + letter.upper(), add_special_tokens=False)


ALL_COUNTED = regex("|".join(map(counted, "abcdefgh")))


def test_a_grammar_whose_lexer_others_filled_is_compiled_anew(
    constraints: Constraints, monkeypatch: pytest.MonkeyPatch
) -> None:
    small_lexers(monkeypatch, 80)
    for letter in "abcdefgh":
        constraint = open_constraint(constraints, ALL_COUNTED)
        begin, *rest = write_counted(letter)
        read_ids(constraint, [begin])
        fork = constraint.fork()
        for either in (constraint, fork):
            read_ids(either, rest)
            assert allowed(either) == TOKENIZER.eos_ids


def test_choices_that_read_again_read_their_own_output(
    constraints: Constraints, monkeypatch: pytest.MonkeyPatch
) -> None:
    small_lexers(monkeypatch, 60)
    form = regex("|".join(map(counted, "abc")))
    read_ids(open_constraint(constraints, form), write_counted("c"))
    first = open_constraint(constraints, form)
    second = first.fork()
    outputs = {first: write_counted("a"), second: write_counted("b")}
    for position in range(32):
        for constraint, output in outputs.items():
            read_ids(constraint, [output[position]])
    assert allowed(first) == allowed(second) == TOKENIZER.eos_ids


def test_a_grammar_that_compiles_long_is_not_compiled_by_the_engine(
    constraints: Constraints, monkeypatch: pytest.MonkeyPatch
) -> None:
    small_lexers(monkeypatch, 60)
    monkeypatch.setattr(grammar, "MAX_ANEW_S", -1.0)
    form = regex("|".join(map(counted, "xyz")))
    read_ids(open_constraint(constraints, form), write_counted("x"))
    constraint = open_constraint(constraints, form)
    with pytest.raises(BadGrammarError, match="too many states"):
        read_ids(constraint, write_counted("y"))
    read_ids(open_constraint(constraints, form), write_counted("y"))  # it was forgotten


def test_a_grammar_that_fills_its_lexer_alone_ends_the_request_and_is_forgotten(
    constraints: Constraints, monkeypatch: pytest.MonkeyPatch
) -> None:
    small_lexers(monkeypatch, 40)
    form = regex(counted("z") * 3)
    messages = []
    for _ in range(2):
        constraint = open_constraint(constraints, form)
        with pytest.raises(BadGrammarError, match="too many states") as caught:
            read_ids(constraint, write_counted("z") * 3)
        messages.append(str(caught.value))
    assert messages[0] == messages[1]
    assert "make it simpler" in messages[0]


def test_a_grammar_whose_masks_take_ever_longer_ends_the_request(
    constraints: Constraints, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(grammar, "SAVED_S", 0.01)
    monkeypatch.setattr(grammar, "TOKEN_S", 0.0005)
    constraint = open_constraint(constraints, lark('start: start start start | "a" | ""'))
    batch, output = MaskBatch(constraints.num_words), TOKENIZER.encode("a") * 2000
    for length in range(len(output)):
        _, errors = batch.fill([(constraint, output[:length])])
        if errors:
            break
    assert isinstance(errors[0], BadGrammarError)
    assert "more than 0.5 ms a token to follow" in str(errors[0])


@pytest.mark.parametrize(
    ("taken_s", "is_ended"),
    [
        ((0.19, 0.0, 0.0), False),
        ((0.15, 0.0, 0.05), False),
        ((0.15, 0.0, 0.07), True),
        ((0.0, 0.0, 0.0, 0.0, 0.201), True),  # more is not saved up
        ((0.00751,) * 78, True),
        ((0.006,) * 150, False),
        ((0.004,) * 500, False),
    ],
)
def test_time_not_taken_is_saved_up_to_a_bound(
    constraints: Constraints,
    monkeypatch: pytest.MonkeyPatch,
    taken_s: tuple[float, ...],
    is_ended: bool,
) -> None:
    clock = iter([reading for seconds in taken_s for reading in (100.0, 100.0 + seconds)])
    constraint = open_constraint(constraints, regex("a*"))
    monkeypatch.setattr(time, "thread_time", lambda: next(clock))
    batch = MaskBatch(constraints.num_words)
    for _ in taken_s[:-1]:
        assert not batch.fill([(constraint, [])])[1]
    _, errors = batch.fill([(constraint, [])])
    assert bool(errors) == is_ended
    if is_ended:
        assert isinstance(errors[0], BadGrammarError)
        assert "more than 5 ms a token" in str(errors[0])


def test_the_trial_does_not_hear_of_a_terminals_interrupt() -> None:
    trial = Trial(VOCABULARY)
    trial.run(source_of("a"), field="")
    assert isinstance(trial._process, subprocess.Popen)
    with open(f"/proc/{trial._process.pid}/stat", encoding="ascii") as file:
        session = int(file.read().rpartition(")")[2].split()[3])
    assert session == trial._process.pid
    trial.close()
