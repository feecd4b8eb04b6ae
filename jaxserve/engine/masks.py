"""Which rows of a step are sampled under a mask."""

from collections.abc import Iterator

from jaxserve.plan import StepPlan


def find_masked(plan: StepPlan) -> Iterator[int]:
    """Yields the ids of the sequences whose next token needs a mask, forked ones too."""
    for chunk in plan.chunks:
        if chunk.is_masked and chunk.samples:
            yield chunk.sequence_id
            for fork in chunk.forks:
                yield fork.sequence_id
