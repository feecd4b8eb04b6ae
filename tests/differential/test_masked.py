"""Masked rows on the real runner: the oracle's tokens under the same masks, whatever happens."""

import dataclasses
import itertools
import json
import re

import pytest

from jaxserve.request import FinishReason, GenerationRequest, StructuredOutput
from jaxserve.runner.runner import Runner
from tests.differential.small import CONFIG, Play, ask, oracle_output, prompt_of
from tests.differential.stage import EOS_ID
from tests.engines import Outputs

PROMPT = prompt_of(7)
DRAWN = {"temperature": 1.2, "seed": 7, "ignore_eos": False, "max_tokens": 14}
REGEX = "([ab]c){1,5}d?"


def form(kind: str, text: str = "", **fields: object) -> StructuredOutput:
    return StructuredOutput(kind=kind, text=text, **fields)  # type: ignore[arg-type]  # by name


def shaped(structured: StructuredOutput, **fields: object) -> GenerationRequest:
    asked = ask(PROMPT, **{**DRAWN, **fields})
    return dataclasses.replace(asked, structured_output=structured)


SCHEMA = json.dumps({"enum": [[1, 2], {"a": "b"}, 77]})
REQUESTS = {
    "regex": shaped(form("regex", REGEX)),
    "greedy regex": shaped(form("regex", REGEX), temperature=0.0),
    "choice": shaped(form("choice", choices=("yes", "yellow", "no"))),
    "schema": shaped(form("json_schema", SCHEMA), max_tokens=20),
    "lark": shaped(form("lark", 'start: ("x" | "yz")+ "."')),
    "penalties": shaped(
        form("regex", "[a-f]+"), repetition_penalty=1.5, presence_penalty=1.0, top_k=3
    ),
    "bias": shaped(form("regex", "[a-f]+"), logit_bias={97: 5.0, 120: 100.0}),
    "allowed": ask(PROMPT, **DRAWN, allowed_token_ids=tuple(range(90, 120))),
    "allowed, before the end": ask(
        PROMPT, **{**DRAWN, "min_tokens": 5}, allowed_token_ids=(97, 98, 99)
    ),
    "bad words": ask(
        PROMPT, **DRAWN, bad_words=("a", "bc", "Z"), logit_bias={97: 9.0, 98: 9.0, 99: 9.0}
    ),
}  # fmt: skip


def run(
    runner: Runner,
    asked: GenerationRequest,
    *,
    overlap: bool = True,
    preempt_at: tuple[int, ...] = (),
) -> Outputs:
    """Runs a request alone; it loses rows and pages before so many steps."""
    play = Play(runner, overlap=overlap)
    guest = play.submit(asked)
    due = list(preempt_at)
    while play.has_work:
        if due and play.num_steps >= due[0] and guest.is_running:
            del due[0]
            play.engine._scheduler.preempt(guest.request)
        play.step()
    play.run()
    return play.read_choices(guest)


@pytest.mark.parametrize("overlap", [True, False])
@pytest.mark.parametrize("name", REQUESTS)
def test_the_tokens_are_the_oracles_under_the_same_masks(
    small_runner: Runner, name: str, overlap: bool
) -> None:
    asked = REQUESTS[name]
    assert run(small_runner, asked, overlap=overlap).token_ids == [oracle_output(asked)]


@pytest.mark.parametrize("overlap", [True, False])
@pytest.mark.parametrize("name", ["regex", "penalties", "bad words"])
def test_a_preemption_leaves_the_constraint_where_it_was(
    small_runner: Runner, name: str, overlap: bool
) -> None:
    asked = REQUESTS[name]
    asked = dataclasses.replace(asked, sampling=dataclasses.replace(asked.sampling, num_choices=2))
    wanted = [oracle_output(asked, choice=choice) for choice in range(2)]
    for points in (*itertools.combinations(range(1, 9), 1), (2, 3), (3, 3), (2, 7)):
        outputs = run(small_runner, asked, overlap=overlap, preempt_at=points)
        assert outputs.token_ids == wanted, points


@pytest.mark.parametrize("overlap", [True, False])
def test_masked_rows_free_rows_and_choices_run_beside_each_other(
    small_runner: Runner, overlap: bool
) -> None:
    """Requests come while others run; more than there are rows."""
    requests = [
        ask(prompt_of(5, salt=1), temperature=0.8, seed=2, max_tokens=9),
        REQUESTS["regex"],
        dataclasses.replace(
            REQUESTS["penalties"],
            sampling=dataclasses.replace(REQUESTS["penalties"].sampling, num_choices=3),
        ),
        ask(prompt_of(3, salt=2), max_tokens=12),
        REQUESTS["bad words"],
        REQUESTS["schema"],
    ]
    play = Play(small_runner, overlap=overlap)
    guests = []
    for asked in requests:
        guests.append(play.submit(asked))
        play.step()
    play.run()
    for asked, guest in zip(requests, guests, strict=True):
        wanted = [oracle_output(asked, choice=n) for n in range(asked.sampling.num_choices)]
        assert play.read_choices(guest).token_ids == wanted


def test_outputs_have_their_form(small_runner: Runner) -> None:
    for seed in range(3):
        for name in ("regex", "choice", "schema", "lark"):
            asked = REQUESTS[name]
            sampling = dataclasses.replace(asked.sampling, seed=seed, max_tokens=30)
            outputs = run(small_runner, dataclasses.replace(asked, sampling=sampling))
            text, reason = outputs.choices[0].text, outputs.finished.reason
            if reason is not FinishReason.EOS:
                assert name == "lark"  # which has no longest text
                continue
            assert outputs.token_ids[0][-1] == EOS_ID
            match name:
                case "regex":
                    assert re.fullmatch(REGEX, text)
                case "choice":
                    assert text in ("yes", "yellow", "no")
                case "schema":
                    assert json.loads(text) in json.loads(SCHEMA)["enum"]
                case "lark":
                    assert re.fullmatch(r"(x|yz)+\.", text)


def test_steps_without_masks_keep_their_way(small_runner: Runner) -> None:
    """Masked tokens are counted, and no others."""
    before = small_runner._metrics.value("masked_tokens_total")
    run(small_runner, ask(PROMPT))
    assert small_runner._metrics.value("masked_tokens_total") == before
    outputs = run(small_runner, REQUESTS["regex"])
    num_masked = small_runner._metrics.value("masked_tokens_total") - before
    assert num_masked == len(outputs.token_ids[0])
    assert CONFIG.runner.overlap
