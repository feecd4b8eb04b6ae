"""What is said of a workload, against small ones counted by hand."""

from collections.abc import Sequence

import pytest

from jaxserve.measure.workload import Header, Prompt, Recipe, WorkloadEntry
from jaxserve.measure.workload.summary import Summary, summarize

OPEN = Header(name="w")


def entry(at_s: float, prompt: Prompt, wanted: int | None = 3, kind: str = "") -> WorkloadEntry:
    return WorkloadEntry(index=0, at_s=at_s, prompt=prompt, wanted_tokens=wanted, prompt_class=kind)


def recipe(num_tokens: int, *blocks: str, block_tokens: float = 8) -> Recipe:
    return Recipe(num_tokens=num_tokens, block_tokens=block_tokens, blocks=blocks)


def of_prompts(prompts: Sequence[Prompt], page_size: int = 4) -> Summary:
    return summarize(OPEN, [entry(0.0, prompt) for prompt in prompts], page_size=page_size)


@pytest.mark.parametrize(
    ("prompts", "shared", "num_sharing"),
    [
        ([recipe(20, "a", "b"), recipe(20, "a", "b")], 16, 1),
        ([recipe(20, "a", "b"), recipe(20, "a", "c")], 8, 1),
        ([recipe(20, "a", "b"), recipe(20, "c", "b")], 0, 0),  # a prefix, not any part
        ([recipe(20, "a", "b"), recipe(16, "a", "b")], 12, 1),  # the last token is computed
        ([recipe(20, "a", "b"), recipe(17, "a", "b")], 16, 1),
        ([recipe(10, "a", "b"), recipe(20, "a", "b")], 8, 1),  # only 2 tokens of b were there
        ([recipe(13, "a", "b"), recipe(20, "a", "b"), recipe(20, "a", "b")], 12 + 16, 2),
        ([recipe(20, "a", "b"), recipe(10, "a", "b"), recipe(20, "a", "b")], 8 + 16, 2),
        ([recipe(20), recipe(20)], 0, 0),
        ([recipe(7, "a"), recipe(7, "a")], 4, 1),
        ([recipe(3, "a"), recipe(3, "a")], 0, 0),  # less than a page
        ([tuple(range(10)), tuple(range(10))], 8, 1),
        ([tuple(range(10)), tuple(range(8))], 4, 1),
        ([tuple(range(10)), (*range(4), *range(9))], 4, 1),
        ([tuple(range(10)), (9, *range(1, 10))], 0, 0),
        ([(1, 2, 3, 4, 5), (256, 2, 3, 4, 5)], 0, 0),
        ([recipe(25, "a", "b", block_tokens=10.5)] * 2, 20, 1),
    ],
)
def test_the_most_that_a_cache_could_share(
    prompts: Sequence[Prompt], shared: int, num_sharing: int
) -> None:
    summary = of_prompts(prompts)
    assert (summary.sharing.shared_tokens, summary.sharing.num_sharing) == (shared, num_sharing)
    assert summary.sharing.hit_rate == shared / summary.total_prompt_tokens


def test_the_page_size_decides() -> None:
    prompts = [recipe(20, "a", "b"), recipe(20, "a", "b")]
    assert [of_prompts(prompts, size).sharing.shared_tokens for size in (1, 16, 32)] == [16, 16, 0]


def test_rates_leave_the_first_request_out() -> None:
    entries = [entry(at_s, recipe(10)) for at_s in (2.0, 3.0, 5.0, 12.0)]
    rates = summarize(OPEN, entries, page_size=4).rates
    assert rates is not None
    assert rates.duration_s == 12.0
    assert rates.requests_per_s == pytest.approx(3 / 10)
    assert rates.prompt_tokens_per_s == pytest.approx(30 / 10)
    assert rates.output_tokens_per_s == pytest.approx(9 / 10)
    # gaps 1, 2, 7: mean 10/3, variance 62/9
    assert rates.burstiness == pytest.approx((100 / 9) / (62 / 9))
    assert rates.busiest_requests == 3  # 12.0 is not within 10 s of 2.0


def test_what_too_few_requests_do_not_tell_is_none() -> None:
    for times in ([4.0], [4.0, 4.0]):
        rates = summarize(OPEN, [entry(t, recipe(10)) for t in times], page_size=4).rates
        assert rates is not None
        assert (rates.requests_per_s, rates.burstiness) == (None, None)
    even = summarize(OPEN, [entry(t, recipe(1)) for t in (0.0, 1.0, 2.0)], page_size=4).rates
    assert even is not None
    assert even.burstiness is None
    empty = summarize(OPEN, [], page_size=4)
    assert (empty.num_requests, empty.rates, empty.sharing.hit_rate) == (0, None, None)
    assert empty.prompt_tokens.count == 0


def test_a_closed_loop_has_no_rates() -> None:
    header = Header(name="w", arrivals="closed", concurrency=2)
    assert summarize(header, [entry(0.0, recipe(10))], page_size=4).rates is None


def test_lengths_classes_and_what_is_not_known_are_counted() -> None:
    entries = [
        entry(0.0, recipe(10), kind="a"),
        entry(0.0, (1, 2, 3), 9, kind="a"),
        entry(0.0, "text", None, kind="b"),
    ]
    summary = summarize(OPEN, entries, page_size=4)
    assert (summary.num_requests, summary.num_texts, summary.num_open_ended) == (3, 1, 1)
    assert (summary.total_prompt_tokens, summary.total_output_tokens) == (13, 12)
    assert (summary.prompt_tokens.min, summary.prompt_tokens.max) == (3.0, 10.0)
    assert summary.output_tokens.mean == 6.0
    assert {name: one.num_requests for name, one in summary.classes.items()} == {"a": 2, "b": 1}
    assert summary.classes["b"].prompt_tokens.count == 0
