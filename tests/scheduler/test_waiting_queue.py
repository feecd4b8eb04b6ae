from jaxserve.config import SchedulerSection
from jaxserve.request import Request, Sequence
from jaxserve.scheduler.policies import build_order
from jaxserve.scheduler.waiting_queue import WaitingQueue
from tests.scheduler.loop import GREEDY

BY_CLASS = build_order(SchedulerSection(ageing_s=None))


def make_sequence(id: int, priority: int = 0) -> Sequence:
    request = Request(
        id=f"r{id}",
        prompt=(5,) * 3,
        sampling=GREEDY,
        seed=0,
        max_tokens=4,
        ends_by_context=False,
        stop_ids={},
        arrival_s=0.0,
        priority=priority,
    )
    return Sequence(id=id, request=request)


def take_all(queue: WaitingQueue) -> list[int]:
    ids = []
    while sequence := queue.find_first():
        queue.remove(sequence)
        ids.append(sequence.id)
    return ids


def test_a_class_is_first_come_and_a_higher_class_comes_before() -> None:
    queue = WaitingQueue(BY_CLASS)
    for id, priority in ((1, 0), (2, 5), (3, 0), (4, -2), (5, 5)):
        queue.add(make_sequence(id, priority))
    assert (len(queue), queue.num_prompt_tokens) == (5, 15)
    assert take_all(queue) == [2, 5, 1, 3, 4]
    assert (len(queue), queue.num_prompt_tokens) == (0, 0)


def test_preempted_sequences_rejoin_the_front_of_their_class_by_age() -> None:
    queue = WaitingQueue(BY_CLASS)
    queue.add(make_sequence(8))
    queue.add(make_sequence(9, priority=1))
    for id in (5, 3, 7, 4):
        queue.add(make_sequence(id))
    assert take_all(queue) == [9, 3, 4, 5, 7, 8]


def test_any_waiting_sequence_can_leave() -> None:
    queue = WaitingQueue(BY_CLASS)
    sequences = [make_sequence(id, priority=id % 2) for id in range(6)]
    for sequence in sequences:
        queue.add(sequence)
    for id in (0, 3, 5, 1):
        queue.remove(sequences[id])
    assert take_all(queue) == [2, 4]
