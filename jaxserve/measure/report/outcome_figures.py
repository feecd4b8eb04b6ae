"""What became of the requests, and which limits they met."""

from collections.abc import Iterator, Mapping
from typing import Any, Final

from jaxserve.measure.report import facts
from jaxserve.measure.report.figures import BarFigure, BarRow, Section, Table
from jaxserve.measure.report.observed import Observed
from jaxserve.measure.report.scales import say, say_share

OUTCOMES: Final[Mapping[str, str]] = {
    "short": "short of the tokens it was to have",
    "refused": "refused before anything ran",
    "failed": "failed later",
    "timed_out": "timed out, or its deadline passed",
    "cancelled": "cut by the end of the replay",
}
MAX_ROWS: Final = 24
MAX_ERRORS: Final = 20
ERROR_WIDTH: Final = 300


def build_section(result: Mapping[str, Any], observed: Observed | None) -> Section:
    figures = [figure for figure in (_outcomes(result), _attainment(result)) if figure is not None]
    tables = []
    if observed is not None and observed.errors:
        errors = observed.errors.most_common(MAX_ERRORS)
        rows = [[say(number), outcome, error[:ERROR_WIDTH]] for (outcome, error), number in errors]
        title = f"Errors, the {len(rows)} most frequent of {len(observed.errors)}"
        tables.append((title, Table(head=("requests", "outcome", "message"), rows=rows)))
    absent = [] if figures else ["Outcomes: the result has none."]
    return Section(
        key="met", title="Outcomes and limits", figures=figures, tables=tables, absent=absent
    )


def _outcomes(result: Mapping[str, Any]) -> BarFigure | None:
    outcomes = facts.mapping(result, "outcomes")
    sent = facts.count(outcomes, "sent")
    if not sent:
        return None
    compliant = facts.count(result, "goodput", "compliant_requests")
    counts = [
        ("ok, every limit met", compliant),
        ("ok, a limit missed", max(0.0, facts.count(outcomes, "ok") - compliant)),
        *((text, facts.count(outcomes, name)) for name, text in OUTCOMES.items()),
    ]
    return BarFigure(
        key="outcomes",
        title="Outcomes",
        about=f"What became of {say(sent)} requests sent, warm-up excepted. Only those in the "
        "first row count as goodput.",
        parts=("requests",),
        rows=[
            BarRow(label=text, values=(number,), text=f"{say(number)} · {say_share(number / sent)}")
            for text, number in counts
        ],
        high=sent,
        table=Table(
            head=("outcome", "requests", "share"),
            rows=[[text, say(number), say_share(number / sent)] for text, number in counts],
        ),
    )


def _attainment(result: Mapping[str, Any]) -> BarFigure | None:
    rows = list(_attainment_rows(facts.mapping(result, "attainment")))
    if not rows:
        return None
    more = f" The table has all {len(rows)}." if len(rows) > MAX_ROWS else ""
    return BarFigure(
        key="attainment",
        title="Attainment",
        about="Requests that ended ok and met the limit, of those sent that it is meant for; "
        f"together: every limit at once, of all sent.{more}",
        parts=("share",),
        rows=[
            BarRow(label=label, values=(share,), text=say_share(share))
            for label, _, _, share in rows[:MAX_ROWS]
        ],
        high=1.0,
        table=Table(
            head=("limit", "met", "requests", "share"),
            rows=[
                [label, say(met), say(number), say_share(share)]
                for label, met, number, share in rows
            ],
        ),
    )


def _attainment_rows(
    attainment: Mapping[str, Any],
) -> Iterator[tuple[str, float, float, float]]:
    """Yields label, requests that met it, requests it is meant for, and the share."""
    classes = facts.mapping(attainment, "classes")
    groups = [("all requests", facts.mapping(attainment, "all"))]
    if len(classes) > 1:
        groups += [
            (f"class {name}" if name else "no class", facts.mapping(found))
            for name, found in classes.items()
        ]
    for name, found in groups:
        sent = facts.count(found, "sent")
        if sent:
            yield (
                f"{name}, together",
                facts.count(found, "compliant"),
                sent,
                facts.count(found, "share"),
            )
        for limit, one in facts.mapping(found, "limits").items():
            number = facts.count(one, "requests")
            yield f"{name}, {limit}", facts.count(one, "met"), number, facts.count(one, "share")
