"""What can never fit is refused by numbers, and what just fits runs (C11)."""

import pytest

from jaxserve.errors import ConfigError, InvalidRequestError
from jaxserve.request import FinishReason
from tests.scheduler.loop import Loop


@pytest.mark.parametrize("max_tokens", [1, 4])
@pytest.mark.parametrize("prompt_len", [43, 44, 45, 46, 47, 48, 49, 52])
@pytest.mark.parametrize("reserve", ["on_demand", "max_length"])
def test_a_request_fits_the_pool_or_is_refused_and_the_next_one_runs(
    prompt_len: int, max_tokens: int, reserve: str
) -> None:
    loop = Loop(max_len=60, reserve=reserve)  # type: ignore[arg-type]
    if prompt_len + max_tokens <= 48:  # 12 pages of 4
        long = loop.add(prompt_len, max_tokens)
    else:
        with pytest.raises(InvalidRequestError, match=f"{prompt_len + max_tokens} .*holds 48"):
            loop.add(prompt_len, max_tokens)
        long = None
    short = loop.add(3, 2)
    loop.drain(max_steps=40)
    assert loop.outcomes[short] is FinishReason.MAX_TOKENS
    assert long is None or len(loop.outputs[long]) == max_tokens


@pytest.mark.parametrize(
    ("prompt_len", "max_tokens", "field"), [(3, 38, "max_tokens"), (40, 1, "prompt")]
)
def test_one_token_past_the_context_is_refused_with_the_field_and_the_fix(
    prompt_len: int, max_tokens: int, field: str
) -> None:
    loop = Loop(max_len=40)
    loop.scheduler.check_fits(prompt_len - 1, max_tokens)
    with pytest.raises(InvalidRequestError, match=r"41 tokens, but .* holds 40; shorten") as caught:
        loop.scheduler.check_fits(prompt_len, max_tokens)
    assert caught.value.field == field


def test_a_pool_of_exactly_the_need_and_the_padding_page_is_enough() -> None:
    loop = Loop(num_pages=1 + 3, max_len=40)
    loop.add(8, 4)
    loop.drain(max_steps=12)
    with pytest.raises(InvalidRequestError, match="13 tokens, but the KV pool holds 12"):
        loop.add(8, 5)


def test_whole_prompts_need_a_step_of_the_longest_one() -> None:
    with pytest.raises(ConfigError, match="prompts of 39 tokens and max_model_tokens is 40"):
        Loop(chunked_prefill=False, chunk_tokens=39, step_tokens=None)
    with pytest.raises(ConfigError, match="prompts of 30 tokens and max_model_tokens is 40"):
        Loop(chunked_prefill=False, chunk_tokens=40, step_tokens=30)


def test_a_chunk_must_hold_a_tile() -> None:
    with pytest.raises(ConfigError, match="less than one tile of 8"):
        Loop(chunk_tokens=5, chunk_tile=8)
