"""The Python API over an engine on the fake runner, and once over a real tiny model's parts."""

import contextlib
import dataclasses
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import jaxserve
from jaxserve.config import Config, LimitsSection
from jaxserve.engine import EngineState
from jaxserve.errors import InvalidRequestError, NotServingError, RequestError
from jaxserve.llm import LLM, Completion, Prompt, as_own_reader
from jaxserve.request import (
    ChatMessage,
    ChatPrompt,
    FinishReason,
    GenerationRequest,
    SamplingParams,
    StructuredOutput,
)
from scripts import generate_offline
from tests.engines import build_engine, check_accounts, check_idle, gather
from tests.fakes import CHAT_TEMPLATE, EOS_ID, expected_output, say

GREEDY = SamplingParams(temperature=0.0, max_tokens=6, ignore_eos=True)
CHAT = (*b"user: hi", EOS_ID, *b"assistant: ")


@pytest.fixture
def llm() -> Iterator[LLM]:
    engine, _ = build_engine(
        script=say({tuple(b"hi"): [*b"hello", EOS_ID], CHAT: [*b"hey", EOS_ID]}),
        bounds=LimitsSection(max_waiting_requests=3),
        chat_template=CHAT_TEMPLATE,
    )
    engine.start()
    with LLM.around(engine) as llm:
        yield llm
    check_idle(engine)
    check_accounts(engine)


def test_one_text_gives_a_list_of_one(llm: LLM) -> None:
    (completion,) = llm.generate("hi")
    assert (completion.text, completion.token_ids) == ("hello", (*b"hello", EOS_ID))
    assert completion.finish_reason is FinishReason.EOS
    assert (completion.usage.prompt_tokens, completion.usage.completion_tokens) == (2, 6)


def test_completions_come_in_the_order_of_the_prompts_however_many(llm: LLM) -> None:
    prompts = [(n, n + 1) for n in range(60)]  # many more than the queue takes
    seen: list[tuple[int, int]] = []
    completions = llm.generate(prompts, GREEDY, progress=lambda *counts: seen.append(counts))
    assert [list(done.token_ids) for done in completions] == [
        expected_output(prompt, GREEDY, 6) for prompt in prompts
    ]
    assert seen == [(n, 60) for n in range(1, 61)]


def test_a_list_of_ids_is_one_prompt_and_kinds_may_be_mixed_in_a_list(llm: LLM) -> None:
    (alone,) = llm.generate([104, 105], GREEDY)
    kinds: list[Prompt] = ["hi", (104, 105), [104, 105]]
    mixed = llm.generate(kinds, GREEDY)
    assert {done.token_ids for done in mixed} == {alone.token_ids}


def test_chat_renders_a_text_as_a_users_message(llm: LLM) -> None:
    conversation = ChatPrompt(messages=(ChatMessage(role="user", content="hi"),))
    prompts: list[Prompt] = ["hi", conversation]
    for done in llm.generate(prompts, chat=True):
        assert (done.text, done.usage.prompt_tokens) == ("hey", len(CHAT))


def test_no_prompts_give_no_completions(llm: LLM) -> None:
    assert llm.generate([]) == []


def test_a_bad_prompt_cancels_the_others_and_the_engine_goes_on(llm: LLM) -> None:
    with pytest.raises(InvalidRequestError, match="a prompt token id is 999"):
        llm.generate([[1, 2], [999]], GREEDY)
    with pytest.raises(InvalidRequestError, match="both token ids and prompts"):
        llm.generate([1, "hi"], GREEDY)  # type: ignore[arg-type]  # on purpose
    with pytest.raises(InvalidRequestError, match="a prompt token id is True"):
        llm.generate([True, 1], GREEDY)
    assert len(llm.generate([1, 2], GREEDY)[0].token_ids) == 6


def test_prompts_may_come_from_a_generator(llm: LLM) -> None:
    llm.generate(["hi", "ho"], GREEDY)  # from here on all of them are in the prefix cache
    listed = llm.generate(["hi", "ho"], GREEDY)
    assert llm.generate((text for text in ("hi", "ho")), GREEDY) == listed  # type: ignore[arg-type]


@pytest.mark.parametrize("prompts", [None, 5, 1.5, b"hi", {"hi": 1}, [None], [1.5], [b"hi"], [{}]])
def test_what_is_no_prompt_is_refused_by_name(llm: LLM, prompts: Any) -> None:  # noqa: ANN401
    with pytest.raises(InvalidRequestError, match=r"^prompts? is .*, but must be text, token ids"):
        llm.generate(prompts, GREEDY)


def test_each_request_has_its_own_parameters_and_its_own_error(llm: LLM) -> None:
    def requests() -> Iterator[GenerationRequest | RequestError]:
        yield GenerationRequest(prompt=(1, 2), sampling=dataclasses.replace(GREEDY, max_tokens=3))
        yield InvalidRequestError("refused before")
        yield GenerationRequest(prompt=(999,), sampling=GREEDY)
        yield GenerationRequest(prompt=(1, 2), sampling=GREEDY)

    first, refused, bad, last = llm.generate_each(requests())
    assert isinstance(first, Completion)
    assert isinstance(last, Completion)
    assert (len(first.token_ids), len(last.token_ids)) == (3, 6)
    assert str(refused) == "refused before"
    assert isinstance(bad, InvalidRequestError)


def test_a_prompt_can_be_streamed(llm: LLM) -> None:
    with llm.stream("hi", chat=True) as stream:
        output = gather(stream)
    assert (output.text, output.started.prompt_tokens) == ("hey", len(CHAT))


def test_a_prompt_may_have_several_choices_and_their_log_probabilities(llm: LLM) -> None:
    params = SamplingParams(
        temperature=0.9, seed=3, max_tokens=5, ignore_eos=True, num_choices=3, logprobs=2,
        prompt_logprobs=1,
    )  # fmt: skip
    completions = llm.generate([(1, 2, 3), (4, 5)], params)
    for prompt, completion in zip([(1, 2, 3), (4, 5)], completions, strict=True):
        assert completion.prompt_ids == prompt
        assert [list(choice.token_ids) for choice in completion.choices] == [
            expected_output(prompt, SamplingParams(temperature=0.9), 5, seed=3, choice=choice)
            for choice in range(3)
        ]
        for choice in completion.choices:
            assert [entry.token_id for entry in choice.logprobs] == list(choice.token_ids)
            assert {len(entry.top_ids) for entry in choice.logprobs} == {2}
            assert choice.finish_reason is FinishReason.MAX_TOKENS
        scored = tuple(entry.token_id for entry in completion.prompt_logprobs)
        assert scored == prompt[1:]
        assert completion.usage.completion_tokens == 15
        assert (completion.token_ids, completion.text, completion.logprobs) == (
            completion.choices[0].token_ids,
            completion.choices[0].text,
            completion.choices[0].logprobs,
        )


def test_a_prompt_can_be_scored_without_an_output(llm: LLM) -> None:
    (scored,) = llm.generate([(1, 2, 3)], SamplingParams(max_tokens=0, prompt_logprobs=0))
    assert (scored.text, scored.token_ids, len(scored.prompt_logprobs)) == ("", (), 2)
    assert scored.finish_reason is FinishReason.MAX_TOKENS


def test_an_output_can_be_given_a_form(llm: LLM) -> None:
    form = StructuredOutput(kind="choice", choices=("yes", "no"))
    params = SamplingParams(temperature=0.9, max_tokens=8)
    done = llm.generate([(1,), (2,), (3,)], params, structured_output=form)
    assert {completion.text for completion in done} <= {"yes", "no"}
    with llm.stream((4,), params, structured_output=form) as stream:
        assert gather(stream).text in ("yes", "no")


def test_who_reads_for_himself_has_no_limits_of_a_server_but_those_he_set() -> None:
    limits = as_own_reader(Config()).limits
    assert limits.queue_timeout_s > 100_000
    assert limits.stream_buffer_bytes > 100_000_000
    assert limits.total_buffer_bytes > limits.stream_buffer_bytes
    assert limits.max_prompt_bytes == Config().limits.max_prompt_bytes
    mine = Config(limits=LimitsSection(queue_timeout_s=3.0))
    assert as_own_reader(mine).limits.queue_timeout_s == 3.0


def test_the_small_script_keeps_order_errors_and_what_is_done(
    llm: LLM, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(generate_offline, "LLM", lambda _: contextlib.nullcontext(llm))
    source, target = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    lines: list[object] = [
        {"prompt": "hi"},
        {"messages": [{"role": "user", "content": "hi"}]},
        {"prompt": "hi", "max_tokns": 3},
        {"prompt": "hi", "max_tokens": 4000},
        {"prompt": "hi", "max_tokens": 2, "temperature": 0},
    ]
    source.write_text("".join(json.dumps(line) + "\n" for line in lines) + "no\n")
    assert generate_offline.main(source, target) == 1
    answers = [json.loads(line) for line in target.read_text().splitlines()]
    assert [answer.get("text") for answer in answers] == ["hello", "hey", None, None, "he", None]
    assert "max_tokns" in answers[2]["error"]
    assert "max_tokens is 4000" in answers[3]["error"]
    assert "line 6" in answers[5]["error"]
    whole = target.read_text()
    target.write_text(whole[:40])
    generate_offline.main(source, target)
    assert target.read_text() == whole
    text = Path(generate_offline.__file__).read_text()
    assert len(text.splitlines()) < 60


def test_a_closed_one_refuses() -> None:
    engine, _ = build_engine()
    engine.start()
    llm = LLM.around(engine)
    llm.close()
    llm.close()
    assert engine.state is EngineState.STOPPED
    with pytest.raises(NotServingError, match="the engine is stopped"):
        llm.generate("hi")


def test_the_package_gives_the_api_lazily() -> None:
    assert jaxserve.LLM is LLM
    assert jaxserve.StructuredOutput is StructuredOutput
    with pytest.raises(AttributeError, match="no attribute 'Lm'"):
        _ = jaxserve.Lm
