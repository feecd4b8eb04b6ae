"""What a step's result means for the sequences in it: tokens, ends, and pages that are kept."""

import dataclasses
from collections.abc import Collection, Mapping

import numpy as np

from jaxserve.metrics import Metrics
from jaxserve.plan import Chunk, Decodes, StepPlan, StepResult, TokenLogprobs
from jaxserve.request import FinishReason, Request, Sequence, SequenceState
from jaxserve.scheduler.admission import Admission
from jaxserve.scheduler.live_set import LiveSet
from jaxserve.scheduler.page_pool import PagePool
from jaxserve.scheduler.prefix_reuse import PrefixReuse


@dataclasses.dataclass(slots=True, eq=False)
class Update:
    """What a committed step brought one live choice. Its fields have places, as one is made of
    nearly every token that is not followed.

    Attributes:
      token_id: the sampled token, an end token too; None where the logits were not finite, or
        nothing was sampled.
      finish: why the choice ends with this; the engine then gives it to `Scheduler.end`.
      logprobs: the token's, where they were asked for.
      prompt_logprobs: of the prompt's next tokens, in order: those of a request's updates together
        are the prompt's from its second token on. They come once, a preemption or not, before its
        first token or with it.
    """

    sequence: Sequence
    token_id: int | None = None
    finish: FinishReason | None = None
    not_finite: bool = False
    logprobs: TokenLogprobs | None = None
    prompt_logprobs: tuple[TokenLogprobs, ...] = ()


class Settlement:
    """Takes results in, in launch order. Who ends with one is noted as ended, and stays until it is
    given to `Scheduler.end` or `finish`.

    Attributes:
      followed_gaps: of the last result's tokens that there is no update of: the seconds since the
        token before it, and how many it is so long.
    """

    def __init__(
        self,
        live: LiveSet,
        *,
        pool: PagePool,
        reuse: PrefixReuse,
        admission: Admission | None,
        metrics: Metrics,
    ) -> None:
        self._live = live.sequences
        self._owners = live.owners
        self._ended = live.ended
        self._stop_ids = live.stop_ids
        self._pool = pool
        self._reuse = reuse
        self._admission = admission
        self._metrics = metrics
        self._now_s = 0.0
        self.followed_gaps: dict[float, int] = {}

    def settle(
        self, plan: StepPlan, result: StepResult, stopped: Collection[int], *, now_s: float
    ) -> list[Update]:
        """Returns what a step brought its live sequences, and has its pages kept. Of those that are
        followed and go on it returns nothing: their outputs have grown.

        Args:
          stopped: ids of sequences whose text ended with this token (a stop string).
          now_s: when the result was read.
        """
        self._now_s, self.followed_gaps = now_s, {}
        updates: list[Update] = []
        chunks: Collection[Chunk]
        chunks = plan.chunks if result.not_finite else self._take_followed(plan, result)
        num_surplus, num_useful = 0, plan.num_chunks - len(chunks)
        is_plain = not result.not_finite and not result.logprobs
        for chunk in chunks:
            if is_plain and chunk.samples and chunk.num_tokens == 1 and not chunk.forks:
                sequence = self._live.get(chunk.sequence_id)
                if sequence is not None and chunk.scoring is None:
                    num_useful += 1
                    updates.append(self._settle_token(sequence, chunk, result, stopped))
                    continue
            live = self._find_live(chunk)
            self._publish(chunk, live, result)
            num_useful += bool(live)
            if chunk.samples:
                num_surplus += 1 + len(chunk.forks) - len(live)
                new = [self._settle(sequence, result, stopped) for sequence in live]
            else:
                new = self._settle_prompt(live, chunk)
            if chunk.scoring and (request := self._owners.get(chunk.sequence_id)):
                new = new or [Update(sequence=self._get_live(request))]
                self._take_scores(new[0], chunk, result)
            updates += new
        self._metrics.useful_rows.inc(num_useful)
        if num_surplus:
            self._metrics.surplus_tokens.inc(num_surplus)
        return updates

    def _take_followed(self, plan: StepPlan, result: StepResult) -> list[Chunk]:
        """Takes in the tokens of those that are followed and go on; returns all other chunks. It
        does what `_settle_token` would, in less time."""
        others: list[Chunk] = []
        going_on = self._settle_decodes(plan.decodes, result, others)
        all_live, token_ids = self._live, result.token_ids
        page_size = self._pool.page_size
        for chunk in plan.singles:
            sequence = all_live.get(chunk.sequence_id)
            if sequence is None or not sequence.request.is_followed or not chunk.samples:
                others.append(chunk)
                continue
            request = sequence.request
            may_go_on = 0 < len(sequence.output) < request.max_tokens - 1
            if not may_go_on or token_ids[sequence.id] in request.stop_ids:
                others.append(chunk)
                continue
            if not (chunk.start + 1) % page_size or sequence.num_preemptions:
                self._publish_token(sequence, chunk.start + 1)
            going_on.append(sequence)
        self._append_all(going_on, token_ids)
        return [*others, *plan.longer]

    def _settle_decodes(
        self, decodes: Decodes, result: StepResult, others: list[Chunk]
    ) -> list[Sequence]:
        """Returns those that go on, once the pages they filled are kept; adds the rest to
        `others`."""
        going_on: list[Sequence] = []
        if not decodes:
            return going_on
        all_live, token_ids = self._live, result.token_ids
        fills_N = (decodes.starts_N + 1) % self._pool.page_size == 0
        filling = set(np.flatnonzero(fills_N).tolist())
        stop_ids = self._stop_ids
        suspects = {id_ for id_, token_id in token_ids.items() if token_id in stop_ids}
        for place, sequence_id in enumerate(decodes.sequence_ids):
            sequence = all_live.get(sequence_id)
            if sequence is None or (
                sequence_id in suspects and token_ids[sequence_id] in sequence.request.stop_ids
            ):
                others.append(decodes.chunk(place))
                continue
            if place in filling or sequence.num_preemptions:  # as for `singles`
                self._publish_token(sequence, int(decodes.starts_N[place]) + 1)
            going_on.append(sequence)
        return going_on

    def _append_all(self, sequences: list[Sequence], token_ids: Mapping[int, int]) -> None:
        """Appends the tokens of those that are followed, and notes how long they took."""
        now_s, before_s, num_same = self._now_s, 0.0, 0
        for sequence in sequences:
            output_s = sequence.output_s
            if output_s[-1] != before_s:
                self._note_gaps(before_s, num_same)
                before_s, num_same = output_s[-1], 0
            num_same += 1
            sequence.num_in_flight -= 1
            sequence.output.append(token_ids[sequence.id])
            output_s.append(now_s)
        self._note_gaps(before_s, num_same)

    def _note_gaps(self, before_s: float, number: int) -> None:
        if number:
            gap_s = self._now_s - before_s
            self.followed_gaps[gap_s] = self.followed_gaps.get(gap_s, 0) + number

    def _publish_token(self, sequence: Sequence, end: int) -> None:
        """Does what `_publish` does, where one finite token was computed."""
        reuse = self._reuse
        if not reuse.is_on:
            return
        is_due = not end % self._pool.page_size or sequence.id in reuse.returning
        if is_due and sequence.state is SequenceState.RUNNING:
            reuse.publish(sequence, end)
        reuse.prove(sequence.id)

    def _settle_token(
        self, sequence: Sequence, chunk: Chunk, result: StepResult, stopped: Collection[int]
    ) -> Update:
        """Does what `_publish` and `_settle` do, for one token of one that decodes alone."""
        self._publish_token(sequence, chunk.start + 1)
        request, output = sequence.request, sequence.output
        token_id = result.token_ids[sequence.id]
        may_end = len(output) + 1 >= request.max_tokens or sequence.id in stopped
        if may_end or token_id in request.stop_ids:
            return self._settle(sequence, result, stopped)
        sequence.num_in_flight -= 1
        output.append(token_id)
        sequence.output_s.append(self._now_s)
        return Update(sequence, token_id)

    def _settle(self, sequence: Sequence, result: StepResult, stopped: Collection[int]) -> Update:
        """Appends the sampled token and decides whether the sequence ends with it."""
        sequence.num_in_flight -= 1
        if sequence.id in result.not_finite:
            self._ended.add(sequence.id)
            return Update(sequence=sequence, not_finite=True)
        request = sequence.request
        token_id = result.token_ids[sequence.id]
        finish = None
        if token_id in request.stop_ids and len(sequence.output) >= request.sampling.min_tokens:
            finish = request.stop_ids[token_id]
        sequence.output.append(token_id)
        sequence.output_s.append(self._now_s)
        if finish is None and sequence.id in stopped:
            finish = FinishReason.STOP
        if finish is None and len(sequence.output) >= request.max_tokens:
            by_context = request.ends_by_context
            finish = FinishReason.CONTEXT_LENGTH if by_context else FinishReason.MAX_TOKENS
        if finish:
            self._ended.add(sequence.id)
            if self._admission is not None:
                self._admission.note_end(sequence)
        return Update(
            sequence=sequence,
            token_id=token_id,
            finish=finish,
            logprobs=result.logprobs.get(sequence.id),
        )

    def _publish(self, chunk: Chunk, live: list[Sequence], result: StepResult) -> None:
        """Keeps the pages that a chunk filled, now that it is known what came of it."""
        not_finite, end = result.not_finite, chunk.start + chunk.num_tokens
        if not_finite and _has_failed(chunk, not_finite):
            self._reuse.forget(chunk.sequence_id, self._live.get(chunk.sequence_id))
            return
        page_size = self._pool.page_size
        is_full = chunk.start // page_size < end // page_size
        if is_full or chunk.sequence_id in self._reuse.returning:
            running = (s for s in live if s.state is SequenceState.RUNNING)
            holder = next(running, None)  # None: who computed it has given its pages up
            if holder is not None:
                self._reuse.publish(holder, end)
        if chunk.samples:
            self._reuse.prove(chunk.sequence_id)

    def _settle_prompt(self, live: list[Sequence], chunk: Chunk) -> list[Update]:
        """Ends a request that wants its prompt scored and no more, after the last chunk of it."""
        if not live or live[0].request.max_tokens:
            return []
        if chunk.start + chunk.num_tokens < live[0].num_tokens:
            return []
        ended = [other for other in live[0].request.sequences if other.id in self._live]
        self._ended.update(other.id for other in ended)
        return [Update(sequence=other, finish=FinishReason.MAX_TOKENS) for other in ended]

    def _take_scores(self, update: Update, chunk: Chunk, result: StepResult) -> None:
        """Adds a chunk's part of its prompt's log-probabilities to the request's update."""
        if chunk.sequence_id in result.not_finite:
            update.not_finite, update.token_id, update.finish = True, None, None
            self._ended.add(update.sequence.id)
            return
        assert chunk.scoring is not None
        update.prompt_logprobs = tuple(result.prompt_logprobs[chunk.sequence_id])
        update.sequence.request.num_scored = chunk.scoring.first + len(chunk.scoring.targets)

    def _find_live(self, chunk: Chunk) -> list[Sequence]:
        """Returns those of a chunk's choices that have not ended."""
        first = self._live.get(chunk.sequence_id)
        live = [] if first is None else [first]
        if not chunk.forks:
            return live
        ids = [fork.sequence_id for fork in chunk.forks]
        return live + [self._live[id_] for id_ in ids if id_ in self._live]

    def _get_live(self, request: Request) -> Sequence:
        return next(sequence for sequence in request.sequences if sequence.id in self._live)


def _has_failed(chunk: Chunk, not_finite: Collection[int]) -> bool:
    """Whether logits of a chunk, or of a choice forked from it, were not finite."""
    return chunk.sequence_id in not_finite or any(
        fork.sequence_id in not_finite for fork in chunk.forks
    )
