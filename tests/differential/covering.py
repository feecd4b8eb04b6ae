"""Pairwise covering arrays: few cases in which every two axis values meet."""

import itertools
from collections.abc import Iterator, Mapping, Sequence

Case = dict[str, object]


def full_product(axes: Mapping[str, Sequence[object]]) -> Iterator[Case]:
    """Yields every combination of the axes' values."""
    for values in itertools.product(*axes.values()):
        yield dict(zip(axes, values, strict=True))


def covering_array(axes: Mapping[str, Sequence[object]]) -> list[Case]:
    """Returns cases such that any two values of any two axes appear together in one of them.

    Greedy, in the manner of AETG (Cohen et al. 1997): start from a pair not met yet, then give
    each other axis the value that meets most new pairs. The same axes give the same cases.
    """
    names = list(axes)
    missing = {
        ((a, x), (b, y))
        for a, b in itertools.combinations(range(len(names)), 2)
        for x in range(len(axes[names[a]]))
        for y in range(len(axes[names[b]]))
    }
    cases = []
    while missing:
        chosen = dict(min(missing))
        for axis in sorted(
            set(range(len(names))) - set(chosen), key=lambda a: -len(axes[names[a]])
        ):
            chosen[axis] = max(
                range(len(axes[names[axis]])),
                key=lambda value: sum(
                    pair in missing for pair in _pairs({**chosen, axis: value}, axis)
                ),
            )
        missing -= set(itertools.combinations(sorted(chosen.items()), 2))
        cases.append({names[axis]: axes[names[axis]][value] for axis, value in chosen.items()})
    return cases


def _pairs(
    chosen: Mapping[int, int], axis: int
) -> Iterator[tuple[tuple[int, int], tuple[int, int]]]:
    """Yields the pairs that one axis's value makes with the others', in axis order."""
    own = (axis, chosen[axis])
    for other in chosen.items():
        if other[0] != axis:
            yield (own, other) if own < other else (other, own)
