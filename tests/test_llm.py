"""The Python API over an engine on the fake runner, and once over a real tiny model's parts."""

from collections.abc import Iterator
from typing import Any

import pytest

import jaxserve
from jaxserve.config import LimitsSection
from jaxserve.engine import EngineState
from jaxserve.errors import InvalidRequestError, NotServingError
from jaxserve.llm import LLM, Prompt
from jaxserve.request import ChatMessage, ChatPrompt, FinishReason, SamplingParams
from tests.engines import build_engine, check_accounts, check_idle
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
    listed = llm.generate(["hi", "ho"], GREEDY)
    assert llm.generate((text for text in ("hi", "ho")), GREEDY) == listed  # type: ignore[arg-type]


@pytest.mark.parametrize("prompts", [None, 5, 1.5, b"hi", {"hi": 1}, [None], [1.5], [b"hi"], [{}]])
def test_what_is_no_prompt_is_refused_by_name(llm: LLM, prompts: Any) -> None:  # noqa: ANN401
    with pytest.raises(InvalidRequestError, match=r"^prompts? is .*, but must be text, token ids"):
        llm.generate(prompts, GREEDY)


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
    with pytest.raises(AttributeError, match="no attribute 'Lm'"):
        _ = jaxserve.Lm
