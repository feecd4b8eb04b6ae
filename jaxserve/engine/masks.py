"""What the rows of a step may sample, by what their choices have said."""

from collections.abc import Mapping

from jaxserve.engine.live_choice import LiveChoice
from jaxserve.errors import RequestError
from jaxserve.plan import StepMasks, StepPlan
from jaxserve.text.mask_batch import MaskBatch


def fill_masks(
    plan: StepPlan, choices: Mapping[int, LiveChoice], batch: MaskBatch
) -> tuple[StepMasks, list[tuple[LiveChoice, RequestError]]]:
    """Returns the masks of a step, all steps before it being read, and the choices that cannot
    have one: their requests end.

    Args:
      choices: those that have not ended, by sequence id.
    """
    found = [(id_, choices[id_]) for id_ in plan.masked_ids if id_ in choices]
    asked = [(c.constraint, c.output) for _, c in found if c.constraint is not None]
    assert len(asked) == len(found), f"step {plan.step_id} masks choices without a constraint"
    masks_NV, errors = batch.fill(asked)
    failed = [(found[place][1], error) for place, error in errors.items()]
    kept = [place for place in range(len(found)) if place not in errors]
    masks = StepMasks(
        sequence_ids=[found[place][0] for place in kept],
        masks_NV=masks_NV[kept] if errors else masks_NV,
    )
    return masks, failed
