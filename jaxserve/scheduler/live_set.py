"""All choices of all requests that have not ended."""

import collections

from jaxserve.request import Request, Sequence, SequenceState
from jaxserve.scheduler.deadlines import is_ended


class LiveSet:
    """Gives sequences their ids, and forgets a request with the last of its choices.

    Attributes:
      sequences: by id, those that have not ended.
      owners: the request of a sequence's id, ended ones of live requests too.
      stop_ids: what ends an output of one of them or another, and of how many requests.
      ended: ids reported as ended, and not yet given to `Scheduler.end` or `finish`.
      num_requests: that have not ended.
    """

    def __init__(self) -> None:
        self.sequences: dict[int, Sequence] = {}
        self.owners: dict[int, Request] = {}
        self.stop_ids: collections.Counter[int] = collections.Counter()
        self.ended: set[int] = set()
        self.num_requests = 0
        self._next_id = 1

    def __bool__(self) -> bool:
        return bool(self.sequences)

    def add(self, request: Request) -> None:
        """Makes a request's sequences, one for each choice: the first waits, for the others."""
        for choice in range(request.sampling.num_choices):
            state = SequenceState.UNFORKED if choice else SequenceState.WAITING
            sequence = Sequence(id=self._next_id, request=request, choice=choice, state=state)
            self._next_id += 1
            request.sequences.append(sequence)
            self.sequences[sequence.id] = sequence
            self.owners[sequence.id] = request
        self.num_requests += 1
        self.stop_ids.update(request.stop_ids.keys())

    def remove(self, sequence: Sequence) -> None:
        """A sequence is FINISHED; with the last of its request's the request is forgotten."""
        self.ended.discard(sequence.id)
        del self.sequences[sequence.id]
        request = sequence.request
        if is_ended(request):
            for other in request.sequences:
                del self.owners[other.id]
            self.num_requests -= 1
            for id_ in request.stop_ids:
                self.stop_ids[id_] -= 1
                if not self.stop_ids[id_]:
                    del self.stop_ids[id_]

    def find_unforked(self) -> list[Sequence]:
        """Returns the choices whose first has not computed the prompt yet."""
        return [s for s in self.sequences.values() if s.state is SequenceState.UNFORKED]

    def check(self) -> None:
        """Asserts that requests and sequences agree, and one choice of each computes its prompt."""
        live = self.sequences.values()
        num_requests = len({id(sequence.request) for sequence in live})
        owners = {id(request) for request in self.owners.values()}
        assert len(owners) == num_requests, "an ended request is remembered"
        assert num_requests == self.num_requests, f"{num_requests} requests are live"
        stop_ids = collections.Counter(
            id_ for request in {s.request for s in live} for id_ in request.stop_ids
        )
        assert stop_ids == self.stop_ids, f"{stop_ids} end outputs, not {self.stop_ids}"
        for sequence in self.find_unforked():
            others = [s for s in sequence.request.sequences if s.id in self.sequences]
            firsts = [s for s in others if s.state is not SequenceState.UNFORKED]
            assert len(firsts) == 1, f"nobody computes the prompt for sequence {sequence.id}"
