"""The books: what the clients saw, what the log says, and what the metrics counted, side by side.

A client knows the end of a call that it read to the end, and the log's line of each of its requests
must say the same. Of a call that it cut off itself it cannot know what the server did: whether the
call ever reached it, and how far it came. There the log decides for the requests, line by line, and
bounds hold for the counts of calls, which have no lines.
"""

import collections
from collections.abc import Iterable, Sequence
from typing import Final

from scripts.judges.checks import Checks
from scripts.judges.idle import Scrape
from scripts.judges.load.books import Call, Failed, Finished, Log

ANONYMOUS: Final = "anonymous"
# What an HTTP client calls the ends that gRPC tells apart.
WORDS: Final = {
    "stop": {"eos", "stop"},
    "tool_calls": {"eos", "stop"},
    "length": {"max_tokens", "context_length", "deadline", "cancelled"},
}
LATE: Final = ("deadline", "slow_reader", "numerics")  # errors of accepted requests
NO_REFUSAL: Final = (*LATE, "client_gone", "cancelled")
CUT_CODES: Final = ("OK", "CANCELLED", "DEADLINE_EXCEEDED")
CUT_STATUSES: Final = ("200", "499")


class Audit:
    """Compares the records of a run; `begun` and `ended` are the metrics before and after it."""

    def __init__(
        self, checks: Checks, calls: Sequence[Call], log: Log, *, begun: Scrape, ended: Scrape
    ) -> None:
        self._checks = checks
        self._calls = calls
        self._log = log
        self._begun = begun
        self._ended = ended
        self._given_up = 0  # streams of ended requests that their clients saw given up

    def run(self) -> None:
        self._check_lines()
        self._check_calls()
        self._check_requests()
        self._check_refusals()
        self._check_doors()

    def counted(self, name: str, **labels: str) -> int:
        """Returns by how much a counter rose during the run."""
        return round(self._ended.value(name, **labels) - self._begun.value(name, **labels))

    def _rows(self, name: str, *labels: str) -> collections.Counter[tuple[str, ...]]:
        rows: collections.Counter[tuple[str, ...]] = collections.Counter()
        for scrape, sign in ((self._ended, 1), (self._begun, -1)):
            for sample in scrape.find(name):
                rows[tuple(sample.labels[label] for label in labels)] += sign * round(sample.value)
        return rows

    def _check_lines(self) -> None:
        """Each accepted request has one line of its end, and is some client's."""
        known = {call.id: call for call in self._calls}
        lines = list(self._log.all_finished())
        twice = [
            n for n, count in collections.Counter(x.request_id for x in lines).items() if count > 1
        ]
        self._checks.same("requests that ended twice", twice, [])
        strange = [line.request_id for line in lines if self._find(known, line) is None]
        self._checks.same("requests that nobody sent", strange, [])
        self._checks.same("errors in the log", self._log.faults[:3], [])

    def _find(self, known: dict[str, Call], line: Finished) -> Call | None:
        return known.get(line.request_id.partition("/")[0].partition("-")[0])

    def _check_calls(self) -> None:
        """What a client saw of its call is what the log says of its requests."""
        wrong: list[str] = []
        for call in self._calls:
            what = self._compare(call, self._log.finished.get(call.id, []))
            if what:
                wrong.append(f"{call}: {what}")
        self._checks.same("calls that the log tells otherwise", wrong[:3], [])
        whole = sum(call.is_done and call.is_generating for call in self._calls)
        cut = [call for call in self._calls if call.cut]
        unseen = sum(not self._has_line(call) for call in cut)
        seen = f"{len(cut)} cut by their clients, {unseen} of these without a line"
        self._checks.holds("whole replies", whole > 0, f"{whole}, {seen}")

    def _compare(self, call: Call, lines: Sequence[Finished]) -> str:
        """Returns what is wrong between a call and the lines of its requests."""
        if any(line.tenant != (call.tenant or ANONYMOUS) for line in lines):
            return f"another tenant's: {lines}"
        if len(lines) > call.num_requests:
            return f"{len(lines)} requests ended"
        if call.is_done:
            return self._compare_done(call, lines)
        if call.reason == "slow_reader":
            self._given_up += all(line.reason != "error_slow_reader" for line in lines)
            return "" if lines else "none ended"
        if call.reason in LATE:
            is_there = any(line.reason == f"error_{call.reason}" for line in lines)
            return "" if is_there else f"the end is another: {lines}"
        if call.reason and any(
            line.reason != "cancelled" for line in lines[call.num_requests - 1 :]
        ):
            return f"it was refused, and ran: {lines}"
        return ""

    def _compare_done(self, call: Call, lines: Sequence[Finished]) -> str:
        if len(lines) != call.num_requests:
            return f"{len(lines)} requests ended"
        if not call.num_requests:
            return ""
        usage = (sum(x.prompt_tokens for x in lines), sum(x.output_tokens for x in lines))
        if call.usage != usage:
            return f"its tokens are {usage}"
        if not call.is_generating:
            return ""
        for line in lines:
            words = call.finishes[-1:] if call.is_ordered else call.finishes
            if not any(line.reason in WORDS.get(word, {word}) for word in words):
                return f"the end is another: {line}"
        return ""

    def _has_line(self, call: Call) -> bool:
        return bool(self._log.finished.get(call.id) or self._log.failed.get(call.id))

    def _check_requests(self) -> None:
        """The counters are the sums of the lines."""
        lines, checks, counted = list(self._log.all_finished()), self._checks, self.counted
        checks.same("requests submitted", counted("requests_submitted_total"), len(lines))
        ends = _sum((line.reason, 1) for line in lines)
        self._same_rows("requests finished", self._rows("requests_finished_total", "reason"), ends)
        for name, amounts in (
            ("requests_submitted", [(line.tenant, 1) for line in lines]),
            ("prompt_tokens", [(line.tenant, line.prompt_tokens) for line in lines]),
            ("output_tokens", [(line.tenant, line.output_tokens) for line in lines]),
        ):
            rows = self._rows(f"tenant_{name}_total", "tenant")
            self._same_rows(f"{name} by tenant", rows, _sum(amounts))
        for reasons in (("cancelled",), ("deadline", "error_deadline")):
            found = [line for line in lines if line.reason in reasons]
            states = (
                sum(not line.was_scheduled for line in found),
                sum(line.was_scheduled and not line.has_first_token for line in found),
                sum(line.has_first_token for line in found),
            )
            seen = "waiting {}, in the prompt {}, later {}".format(*states)
            checks.holds(f"{reasons[0]} in every state", all(states), seen)
        computed = sum(line.prompt_tokens for line in lines if line.has_prompt)
        checks.same("prompt tokens computed", counted("prompt_tokens_total"), computed)
        put = sum(line.output_tokens for line in lines)
        checks.same("output tokens", counted("output_tokens_total"), put)
        for name in ("request_seconds", "request_prompt_tokens", "request_output_tokens"):
            checks.same(f"the count of {name}", counted(f"{name}_count"), len(lines))
        read = sum(call.num_tokens for call in self._calls)
        delivered = counted("delivery_seconds_count")
        seen = f"{read} ≤ {delivered} ≤ {put}"
        checks.holds("output tokens read ≤ delivered ≤ put", read <= delivered <= put, seen)
        least = self._given_up
        unread = sum(call.cut != "" and self._has_ended(call) for call in self._calls)
        given_up = counted("given_up_streams_total")
        seen = f"{least} ≤ {given_up} ≤ {least + unread}"
        checks.holds("streams given up", least <= given_up <= least + unread, seen)
        slow = [call for call in self._calls if call.reason == "slow_reader"]
        most = sum(call.num_requests for call in self._calls if call.cut) + sum(
            call.num_requests for call in slow
        )
        ended = sum(line.reason == "error_slow_reader" for line in lines)
        seen = f"{len(slow)} told, {ended} ended so, {given_up} given up after their end"
        checks.holds("slow readers", len(slow) <= ended + given_up <= most, seen)

    def _has_ended(self, call: Call) -> bool:
        """Whether all requests of a call ended by themselves."""
        lines = self._log.finished.get(call.id, [])
        return bool(lines) and all(line.reason != "cancelled" for line in lines)

    def _check_refusals(self) -> None:
        """Refused is what a line or a client says; nobody knows of one whose client had gone."""
        told = collections.Counter(
            failed.reason for failed in self._log.all_failed() if failed.reason not in NO_REFUSAL
        )
        told.update(
            call.reason
            for call in self._calls
            if call.reason and not self._log.failed.get(call.id) and self._is_refusal(call)
        )
        self._in_bounds("requests refused", "requests_refused_total", told)
        quotas = collections.Counter(
            f"{call.tenant},{call.quota}" for call in self._calls if call.quota
        )
        self._in_bounds("quota refusals", "tenant_quota_refusals_total", quotas)
        wrong = sum(call.reason == "unauthenticated" for call in self._calls)
        self._checks.same("wrong keys", self.counted("auth_failures_total"), wrong)

    def _is_refusal(self, call: Call) -> bool:
        """Whether an error that only the client tells of was counted as a refusal."""
        is_score = call.method == "Score" and call.reason in ("quota_exceeded", "queue_full")
        return is_score or (call.is_generating and call.reason not in NO_REFUSAL)

    def _in_bounds(self, name: str, family: str, told: collections.Counter[str]) -> None:
        """Each counter is what was told, and at most what nobody could hear more."""
        silent = sum(call.cut != "" and not self._has_line(call) for call in self._calls)
        if name == "quota refusals":  # a cut call's line does not say which quota it was
            silent += sum(
                line.reason == "quota_exceeded"
                for call in self._calls
                if call.cut
                for line in self._log.failed.get(call.id, [])
            )
        labels = ("reason",) if "requests" in family else ("tenant", "quota")
        rows = {",".join(key): n for key, n in self._rows(family, *labels).items()}
        more = {key: rows.get(key, 0) - told[key] for key in {*rows, *told}}
        good = all(n >= 0 for n in more.values()) and sum(more.values()) <= silent
        exact = {key: n for key, n in sorted(told.items()) if n}
        extra = {key: n for key, n in more.items() if n}
        self._checks.holds(name, good, f"{exact}, unheard {extra} of at most {silent}")

    def _check_doors(self) -> None:
        self._check_door("rpcs_total", ("method", "code"), "grpc", CUT_CODES)
        self._check_door("http_requests_total", ("route", "status"), "http", CUT_STATUSES)

    def _check_door(
        self, family: str, labels: tuple[str, str], door: str, cut_ends: tuple[str, ...]
    ) -> None:
        """Calls by method and end: exact, but for those that the client cut off."""
        calls = [call for call in self._calls if call.door == door]
        sure: collections.Counter[tuple[str, ...]] = collections.Counter()
        sure.update((call.method, call.end) for call in calls if call.end)
        cut = collections.Counter(call.method for call in calls if call.cut)
        reached = collections.Counter(
            call.method for call in calls if call.cut and self._has_line(call)
        )
        failed = collections.Counter(
            line.method
            for call in calls
            if call.cut
            for line in self._log.failed.get(call.id, [])
            if not _is_cut(line)
        )
        rows = self._rows(family, *labels)
        wrong = []
        for method in {key[0] for key in (*rows, *sure)}:
            more = {key[1]: rows[key] - sure[key] for key in {*rows, *sure} if key[0] == method}
            elsewhere = sum(n for end, n in more.items() if end not in cut_ends)
            is_good = (
                all(n >= 0 for n in more.values())
                and reached[method] <= sum(more.values()) <= cut[method]
                and elsewhere <= failed[method]
            )
            if not is_good:
                wrong.append(f"{method}: {more} more than seen, {cut[method]} were cut")
        exact = sum(sure.values())
        seen = (
            f"{exact} seen, {sum(rows.values()) - exact} more of {sum(cut.values())} that were cut"
        )
        self._checks.holds(f"{door} calls by {labels[0]} and {labels[1]}", not wrong, wrong or seen)

    def _same_rows(
        self,
        name: str,
        got: collections.Counter[tuple[str, ...]],
        wanted: collections.Counter[tuple[str, ...]],
    ) -> None:
        shown = [{k[0]: n for k, n in sorted(rows.items()) if n} for rows in (got, wanted)]
        self._checks.same(name, *shown)


def _sum(amounts: Iterable[tuple[str, int]]) -> collections.Counter[tuple[str, ...]]:
    sums: collections.Counter[tuple[str, ...]] = collections.Counter()
    for tenant, amount in amounts:
        sums[(tenant,)] += amount
    return sums


def _is_cut(line: Failed) -> bool:
    """Whether a failed call is counted as one that the client cut off."""
    return line.reason in ("client_gone", "cancelled", "deadline")
