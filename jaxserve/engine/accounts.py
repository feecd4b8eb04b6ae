"""What is counted, logged and traced of each request: at its start, its tokens, its end."""

import logging
from collections.abc import Mapping

from jaxserve.engine.live_choice import LiveChoice
from jaxserve.engine.live_request import LiveRequest, Outcome, outcome_label
from jaxserve.engine.trace_ring import RequestTrace, TraceRing
from jaxserve.metrics import Metrics
from jaxserve.metrics.tenants import ANONYMOUS

logger = logging.getLogger(__name__)


class Accounts:
    """The phases are those of `metrics/registry.py`. All but `accept` is the engine thread's.

    Prompts and outputs are never logged or traced.
    """

    def __init__(self, metrics: Metrics, trace: TraceRing | None) -> None:
        self._metrics = metrics
        self._trace = trace
        self._gaps: dict[float, int] = {}  # seconds between two tokens → how often, not counted yet
        self._num_tokens = 0  # likewise

    def accept(self, live: LiveRequest) -> None:
        """It is in the queue from now on. The intake calls it, under its lock."""
        self._metrics.requests_submitted.inc()
        self._metrics.requests_waiting.inc()
        self._metrics.waiting_tokens.inc(len(live.request.prompt))

    def start(self, live: LiveRequest, now_s: float) -> None:
        """It is scheduled for the first time: the queue is over."""
        live.scheduled_s = now_s
        self._metrics.queue_seconds.observe(now_s - live.request.arrival_s)

    def add_first_token(self, live: LiveRequest, now_s: float) -> None:
        """A request's first token was put into its stream."""
        self._metrics.ttft_seconds.observe(now_s - live.request.arrival_s)
        self.add_prompt(live, now_s)

    def add_token(self, choice: LiveChoice) -> None:
        """A choice's last token was put into its stream. It is counted by `flush_tokens`, many at
        once."""
        if len(choice.output_s) == 1:
            self._num_tokens += 1
        else:
            before_s, now_s = choice.output_s[-2:]
            self.add_gaps({now_s - before_s: 1})

    def add_gaps(self, gaps: Mapping[float, int]) -> None:
        """Tokens came that are in their streams, or are followed.

        Args:
          gaps: seconds since the token before → how many.
        """
        for gap_s, number in gaps.items():
            self._num_tokens += number
            self._gaps[gap_s] = self._gaps.get(gap_s, 0) + number

    def flush_tokens(self) -> None:
        """Counts the tokens since the last call."""
        if self._num_tokens:
            self._metrics.output_tokens.inc(self._num_tokens)
        for gap_s, count in self._gaps.items():
            self._metrics.itl_seconds.observe_many(gap_s, count)
        self._num_tokens, self._gaps = 0, {}

    def add_prompt(self, live: LiveRequest, now_s: float) -> None:
        """Its prompt is computed."""
        assert live.scheduled_s is not None, "the prompt of a request that was never scheduled"
        self._metrics.prompt_tokens.inc(len(live.request.prompt))
        self._metrics.prefill_seconds.observe(now_s - live.scheduled_s)

    def finish(self, live: LiveRequest, outcome: Outcome, now_s: float) -> None:
        """The request has ended, for whatever reason: nobody has heard of it yet."""
        self.flush_tokens()
        metrics, request, reason = self._metrics, live.request, outcome_label(outcome)
        metrics.requests_finished.labels(reason).inc()
        metrics.e2e_seconds.observe(now_s - request.arrival_s)
        metrics.request_prompt_tokens.observe(len(request.prompt))
        metrics.request_output_tokens.observe(live.num_output)
        decode_s = _since(live.last_token_s, live.first_token_s)
        inference_s = _since(live.last_token_s, live.scheduled_s)
        if decode_s is not None and inference_s is not None:
            metrics.decode_seconds.observe(decode_s)
            metrics.inference_seconds.observe(inference_s)
            if live.longest_output > 1:
                metrics.tpot_seconds.observe(decode_s / (live.longest_output - 1))
        preemptions = live.num_preemptions
        if self._trace is not None:
            self._trace.add_request(
                RequestTrace(
                    request_id=request.id,
                    arrival_s=request.arrival_s,
                    end_s=now_s,
                    timings=live.timings(now_s),
                    end=reason,
                    prompt_tokens=len(request.prompt),
                    output_tokens=live.num_output,
                    preemptions=preemptions,
                    reader=live.stream.reader,
                )
            )
        logger.info(
            "finished request_id=%r tenant=%s reason=%s prompt_tokens=%d output_tokens=%d "
            "preemptions=%d queue_s=%s ttft_s=%s decode_s=%s e2e_s=%s",
            request.id,
            request.tenant or ANONYMOUS,
            reason,
            len(request.prompt),
            live.num_output,
            preemptions,
            _rounded(_since(live.scheduled_s, request.arrival_s)),
            _rounded(_since(live.first_token_s, request.arrival_s)),
            _rounded(decode_s),
            _rounded(now_s - request.arrival_s),
        )


class ThroughputLog:
    """A line of throughput and levels every so often while steps run; none while idle.

    Its rates are by the time since the last line. A rest longer than the interval begins a new
    one: nobody wants the mean over a night.
    """

    def __init__(self, metrics: Metrics, interval_s: float) -> None:
        """Args:
        interval_s: 0 logs nothing.
        """
        self._metrics = metrics
        self._interval_s = interval_s
        self._since_s: float | None = None
        self._rest_s: float | None = None  # when the rest began that still goes on
        self._prompt_tokens = 0.0
        self._output_tokens = 0.0

    def rest(self, now_s: float) -> None:
        """There is no work from now on, until the next step."""
        if self._rest_s is None:
            self._rest_s = now_s

    def note_step(self, now_s: float) -> None:
        """A step's work is done and counted; writes the line when it is due."""
        if not self._interval_s:
            return
        rest_s, self._rest_s = self._rest_s, None
        has_rested = rest_s is not None and now_s - rest_s > self._interval_s
        if self._since_s is None or has_rested:
            self._begin(now_s)
        elif now_s - self._since_s >= self._interval_s:
            self._write(now_s - self._since_s)
            self._begin(now_s)

    def _begin(self, now_s: float) -> None:
        self._since_s = now_s
        self._prompt_tokens = self._metrics.value("prompt_tokens_total")
        self._output_tokens = self._metrics.value("output_tokens_total")

    def _write(self, seconds: float) -> None:
        metrics = self._metrics
        logger.info(
            "throughput prompt_tokens_per_s=%.1f output_tokens_per_s=%.1f running=%d waiting=%d "
            "kv_percent=%.1f",
            (metrics.value("prompt_tokens_total") - self._prompt_tokens) / seconds,
            (metrics.value("output_tokens_total") - self._output_tokens) / seconds,
            metrics.value("requests_running"),
            metrics.value("requests_waiting"),
            100 * metrics.value("kv_usage_ratio"),
        )


def _since(end_s: float | None, start_s: float | None) -> float | None:
    return None if end_s is None or start_s is None else end_s - start_s


def _rounded(seconds: float | None) -> float | None:
    return None if seconds is None else round(seconds, 4)
