"""Who comes first, and who gives pages up first: the order of a policy."""

from collections.abc import Callable, Collection

from jaxserve.config import SchedulerSection
from jaxserve.errors import InvalidRequestError
from jaxserve.request import Request, Sequence

# Less comes first. It never changes while a sequence lives, so that no two ever take turns in
# preempting each other, and a preempted one finds its old place. The last is the id, its age.
Order = tuple[float, float, int]
OrderOf = Callable[[Sequence], Order]


def build_order(config: SchedulerSection) -> OrderOf:
    """Returns the order of a policy.

    - fcfs: by arrival.
    - priority: by class. With ageing each `ageing_s` of waiting counts as much as a class, so that
      who is k classes lower is overtaken by those only that come within k · ageing_s after it.
      As waiting grows alike for all, the order of two does not change with time.
    - edf: by class, in it by deadline: of the whole request, or of its admission if that is sooner.
    - fair: by class, among the requests of one tenant; tenants take turns by `FairShares`.
    """
    ageing_s = config.ageing_s

    def by_age(sequence: Sequence) -> Order:
        return 0.0, 0.0, sequence.id

    def by_class(sequence: Sequence) -> Order:
        return -sequence.request.priority, 0.0, sequence.id

    def by_aged_class(sequence: Sequence) -> Order:
        assert ageing_s is not None
        request = sequence.request
        return request.arrival_s - request.priority * ageing_s, 0.0, sequence.id

    def by_deadline(sequence: Sequence) -> Order:
        return -sequence.request.priority, due_s(sequence.request), sequence.id

    match config.policy:
        case "fcfs":
            return by_age
        case "edf":
            return by_deadline
        case "priority" if ageing_s is not None:
            return by_aged_class
        case "priority" | "fair":
            return by_class


def due_s(request: Request) -> float:
    """Returns the time by which something of a request is due; infinite where nothing is."""
    deadlines = (request.deadline_s, request.queue_deadline_s)
    return min((due for due in deadlines if due is not None), default=float("inf"))


def check_priority(config: SchedulerSection, priority: int) -> None:
    """Refuses a class where there are none.

    Raises:
      InvalidRequestError: names the policy.
    """
    if config.policy == "fcfs" and priority:
        raise InvalidRequestError(
            f"priority is {priority}, but this server's scheduler.policy is fcfs, which has no "
            "classes; leave it out",
            field="priority",
        )


def find_victim(
    running: Collection[Sequence], order: OrderOf, *, max_preemptions: int
) -> Sequence | None:
    """Returns whom a preemption costs least: of the lowest class whoever has computed least, the
    last in order of equals. Who was preempted `max_preemptions` times is spared while there is
    anybody else; then it is the last in order, so that the first goes on whatever happens.
    """
    spared = [s for s in running if s.num_preemptions < max_preemptions]
    if not spared:
        return max(running, key=order, default=None)
    lowest = min(s.request.priority for s in spared)
    others = [s for s in spared if s.request.priority == lowest]
    return max(others, key=lambda s: (-s.num_computed, order(s)))
