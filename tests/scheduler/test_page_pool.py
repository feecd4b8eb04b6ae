import pytest

from jaxserve.scheduler.page_pool import PagePool


def test_the_padding_page_is_never_handed_out() -> None:
    pool = PagePool(num_pages=5, page_size=4)
    assert sorted(pool.allocate(4)) == [1, 2, 3, 4]
    assert (pool.num_free, pool.num_held, pool.num_usable, pool.capacity_tokens) == (0, 4, 4, 16)


@pytest.mark.parametrize(("num_tokens", "num_pages"), [(0, 0), (1, 1), (4, 1), (5, 2), (8, 2)])
def test_pages_are_counted_by_full_and_part_filled_pages(num_tokens: int, num_pages: int) -> None:
    assert PagePool(num_pages=5, page_size=4).pages_for(num_tokens) == num_pages


def test_a_page_waits_for_the_last_step_that_may_write_it() -> None:
    pool = PagePool(num_pages=5, page_size=4)
    pages = pool.allocate(2)
    pool.release(pages, last_step=3)
    pool.check([])
    assert (pool.num_free, pool.num_pending) == (2, 2)
    pool.retire(2)
    assert pool.num_free == 2
    pool.retire(3)
    assert (pool.num_free, pool.num_pending) == (4, 0)
    pool.check([])


def test_a_page_whose_steps_have_retired_is_free_at_once() -> None:
    pool = PagePool(num_pages=5, page_size=4)
    pages = pool.allocate(2)
    pool.retire(3)
    pool.release(pages, last_step=3)
    assert pool.num_free == 4


def test_a_shared_page_is_free_only_after_its_last_holder_and_the_latest_step() -> None:
    pool = PagePool(num_pages=5, page_size=4)
    pages = pool.allocate(2)
    pool.share(pages, 8)
    pool.check([pages, pages])
    pool.release(pages, last_step=5)
    pool.check([pages])
    assert (pool.num_free, pool.num_pending, pool.num_held) == (2, 0, 2)
    pool.release(pages, last_step=1)  # this holder's steps are long gone, the other's are not
    pool.retire(4)
    assert (pool.num_free, pool.num_pending) == (2, 2)
    pool.retire(5)
    assert pool.num_free == 4


def test_shared_tokens_are_counted_for_each_holder_but_one() -> None:
    pool = PagePool(num_pages=5, page_size=4)
    pages = pool.allocate(2)
    pool.share(pages, 6)  # the second page is half full
    pool.share(pages[:1], 4)
    assert pool.num_repeated_tokens == 6 + 4
    assert (pool.is_shared(pages[0]), pool.is_shared(pages[1])) == (True, True)
    pool.check([pages, pages, pages[:1]])
    pool.release(pages, last_step=0)
    assert pool.num_repeated_tokens == 4
    assert (pool.is_shared(pages[0]), pool.is_shared(pages[1])) == (True, False)
    pool.release(pages[:1], last_step=0)
    assert pool.num_repeated_tokens == 0
    pool.check([pages])


def test_what_leaving_tables_free_is_what_nobody_else_holds() -> None:
    pool = PagePool(num_pages=7, page_size=4)
    first, other = pool.allocate(3), pool.allocate(1)
    assert pool.num_freed_by([first, other]) == 4
    pool.share(first[:2], 8)
    second = [*first[:2], *pool.allocate(1)]
    assert pool.num_freed_by([first]) == pool.num_freed_by([second]) == 1
    assert pool.num_freed_by([first, second]) == 4


def test_check_finds_shared_tokens_that_are_counted_wrong() -> None:
    pool = PagePool(num_pages=5, page_size=4)
    pages = pool.allocate(2)
    pool.share(pages, 6)
    pool.num_repeated_tokens -= 1
    with pytest.raises(AssertionError, match="6 tokens are shared"):
        pool.check()


def test_a_page_released_twice_is_an_error() -> None:
    pool = PagePool(num_pages=5, page_size=4)
    pages = pool.allocate(1)
    pool.release(pages, last_step=0)
    with pytest.raises(AssertionError, match="released but not held"):
        pool.release(pages, last_step=0)


def test_a_page_that_nobody_holds_cannot_be_shared() -> None:
    with pytest.raises(AssertionError, match="shared but not held"):
        PagePool(num_pages=5, page_size=4).share([2], 4)


def test_check_finds_a_page_that_is_free_and_in_a_table() -> None:
    pool = PagePool(num_pages=5, page_size=4)
    pages = pool.allocate(2)
    pool.check([pages])
    with pytest.raises(AssertionError, match="reference counts"):
        pool.check([pages, [4]])
    with pytest.raises(AssertionError, match="reference counts"):
        pool.check([])


def test_check_finds_a_page_that_is_lost_or_twice() -> None:
    pool = PagePool(num_pages=5, page_size=4)
    pool._free.append(2)
    with pytest.raises(AssertionError, match="lost or twice"):
        pool.check()
    pool._free[-2:] = []
    with pytest.raises(AssertionError, match="lost or twice"):
        pool.check()
