"""Padded step shapes, mechanisms and what else the server counted."""

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final

from jaxserve.measure.report import facts
from jaxserve.measure.report.figures import (
    BarFigure,
    BarRow,
    Cell,
    Figure,
    HeatFigure,
    Section,
    Table,
)
from jaxserve.measure.report.scales import say, say_bytes, say_share
from jaxserve.mechanisms import MECHANISMS, Mechanism

MAX_BARS: Final = 16
MAX_SIDE: Final = 12  # rows and columns of a heat map that can be read
_BUCKET: Final = re.compile(r"(\d{1,9})x(\d{1,9})\+(\d{1,9})")


def build_section(result: Mapping[str, Any]) -> Section:
    """Returns the padded step shapes and the mechanisms' counters."""
    buckets = [
        (facts.text(row, "bucket"), facts.count(row, "steps"), *_tokens(row))
        for row in facts.items(result, "server", "buckets")
    ]
    buckets = [bucket for bucket in buckets if bucket[2] + bucket[3] > 0]
    figures: list[Figure] = []
    if buckets:
        heat = _bucket_heat(buckets)
        figures += [*([heat] if heat else []), _bucket_bars(buckets)]
    tables = [*_server_tables(result), *_energy_tables(result)]
    absent = [] if buckets else ["Buckets: the server does not tell them."]
    if not tables:
        absent.append("Counters of mechanisms: the server's metrics could not be read.")
    return Section(key="server", title="Server", figures=figures, tables=tables, absent=absent)


_Bucket = tuple[str, float, float, float]


def _tokens(row: Any) -> tuple[float, float]:  # noqa: ANN401  # any JSON value
    return facts.count(row, "real_tokens"), facts.count(row, "padded_tokens")


def _bucket_heat(buckets: Sequence[_Bucket]) -> HeatFigure | None:
    """Returns decoding rows by chunk tokens; None where the names are not such, or too many."""
    cells: dict[tuple[int, int], _Bucket] = {}
    for bucket in buckets:
        found = _BUCKET.fullmatch(bucket[0])
        if found is None:
            return None
        place = (int(found[1]) * int(found[2]), int(found[3]))
        if place in cells:
            return None
        cells[place] = bucket
    rows = sorted({row for row, _ in cells})
    columns = sorted({column for _, column in cells})
    if len(rows) > MAX_SIDE or len(columns) > MAX_SIDE:
        return None
    whole = sum(real + padded for _, _, real, padded in buckets)
    return HeatFigure(
        key="bucket-heat",
        title="Padding by bucket",
        about="A bucket is a step's padded shape: decoding rows by prompt tokens. In each: the "
        "share of its tokens that was padding (the darker, the more), and below it the share of "
        "all computed tokens that it had.",
        x_label="prompt tokens of the bucket",
        y_label="decoding rows",
        columns=[str(column) for column in columns],
        rows=[str(row) for row in rows],
        cells=[[_cell(cells.get((row, column)), whole) for column in columns] for row in rows],
        table=_bucket_table(buckets),
    )


def _cell(bucket: _Bucket | None, whole: float) -> Cell | None:
    if bucket is None:
        return None
    name, steps, real, padded = bucket
    share = padded / (real + padded)
    of_all = (real + padded) / whole
    return Cell(
        heat=share,
        text=f"{100 * share:.0f} %",
        small=f"{100 * of_all:.0f} %" if of_all >= 0.005 else "<1 %",
        tip=f"{name}: {say(steps)} steps, {say(real)} real and {say(padded)} padded tokens",
    )


def _bucket_bars(buckets: Sequence[_Bucket]) -> BarFigure:
    ordered = sorted(buckets, key=lambda bucket: -(bucket[2] + bucket[3]))
    real, padded = sum(bucket[2] for bucket in buckets), sum(bucket[3] for bucket in buckets)
    more = f" The {MAX_BARS} largest; the table has all." if len(buckets) > MAX_BARS else ""
    return BarFigure(
        key="bucket-tokens",
        title="Real and padded tokens",
        about=f"Tokens computed by bucket. Of all {say(real + padded)}, "
        f"{say_share(padded / (real + padded))} were padding.{more}",
        parts=("real", "padded"),
        rows=[
            BarRow(
                label=f"{name} · {say(steps)} steps",
                values=(real, padded),
                text=f"{say(real)} + {say(padded)}",
            )
            for name, steps, real, padded in ordered[:MAX_BARS]
        ],
        high=max(real + padded for _, _, real, padded in buckets),
        table=_bucket_table(ordered),
    )


def _bucket_table(buckets: Sequence[_Bucket]) -> Table:
    return Table(
        head=("bucket", "steps", "real tokens", "padded tokens", "padding"),
        rows=[
            [name, say(steps), say(real), say(padded), say_share(padded / (real + padded))]
            for name, steps, real, padded in buckets
        ],
    )


def _server_tables(result: Mapping[str, Any]) -> Iterator[tuple[str, Table]]:
    server = facts.mapping(result, "server")
    if not server:
        return
    delta = facts.mapping(server, "delta")
    rows = [
        [mechanism.name, _state(mechanism, result), counter, say(facts.number(delta, counter))]
        for mechanism in MECHANISMS
        for counter in mechanism.counters
    ]
    yield (
        "Mechanisms: what proves that each ran",
        Table(head=("mechanism", "switch", "counter", "count"), rows=rows),
    )
    facts_of = [
        ("prompt tokens spared by a cache", say_share(facts.number(result, "tokens", "hit_rate"))),
        ("rows of the batch in use", say_share(facts.number(server, "row_occupancy"))),
        ("KV use, most", say_share(facts.number(server, "kv_usage_peak"))),
        ("KV capacity, tokens", say(facts.number(server, "kv_capacity_tokens"))),
        ("memory, most", say_bytes(facts.number(server, "peak_memory_bytes"))),
        ("padding of all tokens", say_share(facts.number(server, "padding_share"))),
        ("host gap", say_share(facts.number(server, "host_gap_share"))),
        ("programs a step", say(facts.number(server, "programs_per_step"))),
        ("steps wholly in CUDA graphs", say_share(facts.number(server, "captured_share"))),
        (
            "steps in a larger bucket for want of theirs",
            say(facts.number(delta, "bucket_fallbacks_total")),
        ),
        ("preemptions", say(facts.number(server, "preemptions"))),
        ("tokens computed again", say(facts.number(server, "recomputed_tokens"))),
        ("programs compiled before", say(facts.number(server, "compiles", "before_serving"))),
        ("programs compiled meanwhile", say(facts.number(server, "compiles", "while_serving"))),
    ]
    yield "The server in numbers", Table(head=("", "value"), rows=[list(row) for row in facts_of])


def _energy_tables(result: Mapping[str, Any]) -> Iterator[tuple[str, Table]]:
    energy = facts.mapping(result, "energy")
    if not energy:
        return
    rows = [
        (f"joules, {part}", say(facts.number(energy, "parts", part)))
        for part in facts.mapping(energy, "parts")
    ]
    rows += [
        ("joules per compliant output token", say(facts.number(energy, "per_compliant_token"))),
        ("joules per output token", say(facts.number(energy, "per_output_token"))),
    ]
    rows += [
        (f"not known: {part}", str(why)) for part, why in facts.mapping(energy, "missing").items()
    ]
    yield "Energy, idle power included", Table(head=("", "value"), rows=rows)


def _state(mechanism: Mechanism, result: Mapping[str, Any]) -> str:
    config = facts.mapping(result, "manifest", "config")
    value = facts.get(config, *mechanism.key.split("."))
    if value is not None:
        return "on" if mechanism.is_turned_on_by(value) else "off"
    told = facts.get(config, "mechanisms")  # of a server elsewhere: those that are on, by name
    if isinstance(told, str):
        return "on" if mechanism.name in told.split(",") else "off"
    return "not told"
