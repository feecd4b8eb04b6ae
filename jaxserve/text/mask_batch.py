"""The masks of a step, those of grammars all in one call."""

import time
from collections.abc import Sequence
from typing import Final

import llguidance
import numpy as np

from jaxserve.errors import RequestError
from jaxserve.text.constraints import Constraint
from jaxserve.text.grammar import SAVED_S, TOKEN_S

MIN_TOGETHER: Final = 4  # with fewer a call less is worth less than knowing what each one took
MIN_APART, MAX_APART = 16, 1024  # steps


class MaskBatch:
    """Reads what outputs have got and fills the masks after them; one thread.

    A call of llguidance lets go of the interpreter, and has to wait for it again if somebody else
    takes it meanwhile; so there is one for all grammars of a step. What one of them takes is not
    known then. All together may take what one alone may, `TOKEN_S` a step and what is saved up of
    it, so that none takes more; where they do, each is filled apart and charged for it, for some
    steps, and for twice as many the next time.

    Attributes:
      num_together: grammars whose masks the last call filled together.
    """

    def __init__(self, num_words: int, *, num_threads: int = 1) -> None:
        """Args:
        num_words: of a mask.
        num_threads: to fill masks with.
        """
        self._num_words = num_words
        self._num_threads = num_threads
        self._executor: llguidance.LLExecutor | None = None
        self._left_s = SAVED_S
        self._num_apart = 0  # steps to come
        self._apart_steps = MIN_APART  # of the next time
        self.num_together = 0

    def fill(
        self, asked: Sequence[tuple[Constraint, Sequence[int]]]
    ) -> tuple[np.ndarray, dict[int, RequestError]]:
        """Returns a mask of each, and what is wrong with those that have none, by place.

        Args:
          asked: constraints, each with all of its output.
        """
        num_asked, self.num_together = len(asked), 0
        masks_NV = np.empty((num_asked, self._num_words), np.uint32)
        if num_asked < MIN_TOGETHER:
            return masks_NV, self._fill_apart(asked, masks_NV)
        if self._num_apart:
            self._num_apart -= 1
            return masks_NV, self._fill_apart(asked, masks_NV)
        started_s = time.monotonic()
        errors = self._fill_together(asked, masks_NV)
        self._charge(time.monotonic() - started_s)
        return masks_NV, errors

    def _fill_apart(
        self, asked: Sequence[tuple[Constraint, Sequence[int]]], masks_NV: np.ndarray
    ) -> dict[int, RequestError]:
        errors: dict[int, RequestError] = {}
        for place, (constraint, output) in enumerate(asked):
            started_s = time.thread_time()
            try:
                constraint.read(output)
                constraint.fill(masks_NV[place])
                constraint.charge(time.thread_time() - started_s)
            except RequestError as error:
                errors[place] = error
        return errors

    def _fill_together(
        self, asked: Sequence[tuple[Constraint, Sequence[int]]], masks_NV: np.ndarray
    ) -> dict[int, RequestError]:
        errors: dict[int, RequestError] = {}
        matchers: list[tuple[llguidance.LLMatcher, int]] = []
        for place, (constraint, output) in enumerate(asked):
            try:
                constraint.read(output)
            except RequestError as error:
                errors[place] = error
                continue
            if (matcher := constraint.matcher) is not None:
                matchers.append((matcher, place))
        if matchers:
            self.num_together = len(matchers)
            row_bytes = masks_NV.strides[0]
            self._get_executor().unsafe_compute_mask_ptr(
                matchers, masks_NV.ctypes.data, row_bytes, len(masks_NV)
            )
        for place, mask_V in enumerate(masks_NV):
            if place in errors:
                continue
            try:
                asked[place][0].finish(mask_V)
            except RequestError as error:
                errors[place] = error
        return errors

    def _get_executor(self) -> llguidance.LLExecutor:
        """Returns what has the threads.

        Theirs are Rust's 2 MiB of stack. llguidance descends by recursion where it compiles; of
        what that took 4 MiB for, the masks took less than 128 KiB.
        """
        if self._executor is None:
            self._executor = llguidance.LLExecutor(self._num_threads)
        return self._executor

    def _charge(self, seconds: float) -> None:
        self._left_s = min(SAVED_S, self._left_s + TOKEN_S) - seconds
        if self._left_s < 0:
            self._left_s, self._num_apart = SAVED_S, self._apart_steps
            self._apart_steps = min(2 * self._apart_steps, MAX_APART)
