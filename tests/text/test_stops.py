"""Stop strings against a reference that has the whole text (CASES C34)."""

import itertools
import random

import pytest

from jaxserve.text.stops import StopMatcher

TEXT = "one, two, three"
STOP_SETS = [
    (),
    ("two",),
    (", t",),
    ("e, two, th",),
    ("three",),
    ("three four",),
    ("o",),
    (TEXT,),
    ("absent",),
    ("two", "e, two, th"),
    ("ee", "e"),
    ("two, three!", "three"),
]


def reference(
    text: str, stops: tuple[str, ...], *, include_stop_text: bool
) -> tuple[str, str | None]:
    """The match whose end comes first, of those the longest, by str.find on the whole text."""
    found = [(text.find(stop) + len(stop), -len(stop), stop) for stop in stops if stop in text]
    if not found:
        return text, None
    end, _, stop = min(found)
    return text[:end] if include_stop_text else text[: end - len(stop)], stop


def run(
    pieces: list[str], stops: tuple[str, ...], *, include_stop_text: bool
) -> tuple[str, str | None]:
    matcher = StopMatcher(stops, include_stop_text)
    text = ""
    for piece in pieces:
        output = matcher.push(piece)
        text += output.text
        if output.matched is not None:
            return text + matcher.flush(), output.matched
    return text + matcher.flush(), None


def splits(text: str, *, max_size: int) -> list[list[str]]:
    """The text cut into equal pieces of each size, and at every single place."""
    equal = [
        [text[i : i + size] for i in range(0, len(text), size)] for size in range(1, max_size + 1)
    ]
    return equal + [[text[:i], text[i:]] for i in range(len(text) + 1)]


@pytest.mark.parametrize("include_stop_text", [False, True])
@pytest.mark.parametrize("stops", STOP_SETS)
def test_every_split_gives_what_the_whole_text_gives(
    stops: tuple[str, ...], include_stop_text: bool
) -> None:
    for text in (TEXT, TEXT + " four", "", "e, two, t", "🌶 one, two"):
        wanted = reference(text, stops, include_stop_text=include_stop_text)
        for pieces in splits(text, max_size=4):
            assert run(pieces, stops, include_stop_text=include_stop_text) == wanted


def test_random_texts_equal_the_reference() -> None:
    rng = random.Random(34)
    for _ in range(3000):
        alphabet = rng.choice(["ab", "abc", "aé🌶"])
        text = "".join(rng.choices(alphabet, k=rng.randint(0, 14)))
        stops = tuple(
            "".join(rng.choices(alphabet, k=rng.randint(1, 5))) for _ in range(rng.randint(1, 3))
        )
        cuts = sorted(rng.choices(range(len(text) + 1), k=rng.randint(0, 6)))
        pieces = [text[a:b] for a, b in itertools.pairwise([0, *cuts, len(text)])]
        for include in (False, True):
            wanted = reference(text, stops, include_stop_text=include)
            assert run(pieces, stops, include_stop_text=include) == wanted


def test_only_a_suffix_that_may_become_a_stop_is_held_back() -> None:
    rng = random.Random(35)
    for _ in range(300):
        stops = tuple("".join(rng.choices("ab", k=rng.randint(1, 5))) for _ in range(2))
        matcher, fed, released = StopMatcher(stops), "", ""
        for char in rng.choices("abc", k=12):
            output = matcher.push(char)
            if output.matched is not None:
                break
            fed, released = fed + char, released + output.text
            held = fed[len(released) :]
            assert fed.startswith(released)
            longest = max(
                size for stop in stops for size in range(len(stop)) if fed.endswith(stop[:size])
            )
            assert len(held) == longest


@pytest.mark.parametrize(
    ("stops", "wanted"),
    [
        (("ab", "abc"), ("", "ab")),
        (("bc", "abc"), ("", "abc")),
        (("ab", "abc", "bc"), ("", "ab")),
    ],
)
def test_the_stop_complete_first_wins_and_then_the_longest(
    stops: tuple[str, ...], wanted: tuple[str, str]
) -> None:
    for order in itertools.permutations(stops):
        for pieces in splits("abc", max_size=3):
            assert run(pieces, order, include_stop_text=False) == wanted


def test_a_prefix_that_never_completes_is_released_at_the_end() -> None:
    matcher = StopMatcher(("END.",))
    assert matcher.push("the EN").text == "the "
    assert matcher.push("D").text == ""
    assert matcher.flush() == "END"


def test_text_after_the_match_is_dropped() -> None:
    matcher = StopMatcher(("two",), include_stop_text=True)
    output = matcher.push("one two three")
    assert (output.text, output.matched) == ("one two", "two")
    assert (matcher.push(" four").text, matcher.flush()) == ("", "")


def test_a_stop_may_not_end_before_min_tokens_but_may_begin() -> None:
    matcher = StopMatcher(("stop",))
    text = matcher.push_unmatched("stop, st")
    assert text == "stop, "
    output = matcher.push("op now")
    assert (output.text, output.matched) == ("", "stop")
