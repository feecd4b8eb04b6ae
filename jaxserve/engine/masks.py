"""What the rows of a step may sample, by what their choices have said."""

import dataclasses
from collections.abc import Iterator, Mapping

from jaxserve.engine.live_choice import LiveChoice
from jaxserve.errors import RequestError
from jaxserve.plan import StepPlan, TokenMask


@dataclasses.dataclass(slots=True, kw_only=True)
class StepMasks:
    """A step's masks, and the choices that cannot have one: their requests end.

    Attributes:
      by_sequence: of the choices that have not ended.
    """

    by_sequence: dict[int, TokenMask] = dataclasses.field(default_factory=dict)
    failed: list[tuple[LiveChoice, RequestError]] = dataclasses.field(default_factory=list)


def fill_masks(plan: StepPlan, choices: Mapping[int, LiveChoice]) -> StepMasks:
    """Returns the masks of a step, all steps before it being read.

    Args:
      choices: those that have not ended, by sequence id.
    """
    masks = StepMasks()
    for sequence_id in _find_masked(plan):
        choice = choices.get(sequence_id)
        if choice is None or choice.constraint is None:  # it has ended by what was just read
            continue
        try:
            masks.by_sequence[sequence_id] = choice.constraint.fill_mask()
        except RequestError as error:
            masks.failed.append((choice, error))
    return masks


def _find_masked(plan: StepPlan) -> Iterator[int]:
    for chunk in plan.masked:
        yield chunk.sequence_id
        for fork in chunk.forks:
            yield fork.sequence_id
