"""The order in which waiting sequences are admitted: by priority class, then first come."""

import bisect
import itertools
from collections import OrderedDict

from jaxserve.request import Sequence


class WaitingQueue:
    """Inside a class the ids rise: new ones join the back, and a preempted one, which is older than
    all that wait behind it, rejoins the front. Every operation is independent of the length.
    """

    def __init__(self) -> None:
        self._classes: dict[int, OrderedDict[int, Sequence]] = {}
        self._priorities: list[int] = []  # of the classes that are not empty, rising
        self._num_sequences = 0
        self.num_prompt_tokens = 0

    def __len__(self) -> int:
        return self._num_sequences

    def find_first(self) -> Sequence | None:
        """Returns the sequence to admit next."""
        if not self._priorities:
            return None
        return next(iter(self._classes[self._priorities[-1]].values()))

    def append(self, sequence: Sequence) -> None:
        self._insert(sequence)

    def put_back(self, sequence: Sequence) -> None:
        """Puts a preempted sequence at the front of its class, behind older preempted ones."""
        self._insert(sequence)
        members = self._classes[sequence.request.priority]
        older = list(itertools.takewhile(lambda id_: id_ < sequence.id, members))
        for id_ in (sequence.id, *reversed(older)):
            members.move_to_end(id_, last=False)

    def remove(self, sequence: Sequence) -> None:
        priority = sequence.request.priority
        members = self._classes[priority]
        del members[sequence.id]
        self._num_sequences -= 1
        self.num_prompt_tokens -= len(sequence.request.prompt)
        if not members:
            del self._classes[priority]
            self._priorities.remove(priority)

    def _insert(self, sequence: Sequence) -> None:
        priority = sequence.request.priority
        if priority not in self._classes:
            self._classes[priority] = OrderedDict()
            bisect.insort(self._priorities, priority)
        self._classes[priority][sequence.id] = sequence
        self._num_sequences += 1
        self.num_prompt_tokens += len(sequence.request.prompt)
