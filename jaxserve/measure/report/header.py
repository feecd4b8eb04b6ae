"""The top of the page: what was measured, what a reader must know, and the figures in short."""

from collections.abc import Mapping, Sequence
from typing import Any, Final

from jaxserve.measure.report import facts
from jaxserve.measure.report.markup import Markup, element, shorten
from jaxserve.measure.report.scales import say, say_bytes, say_share, say_time

MAX_WARNINGS: Final = 30


def build_header(result: Mapping[str, Any]) -> list[Markup]:
    """Returns the parts of the header below the title."""
    is_sweep = facts.text(result, "kind") == "sweep"
    return [
        _facts(result),
        _warnings(facts.items(result, "warnings")),
        _tiles(_sweep_tiles(result) if is_sweep else _run_tiles(result)),
    ]


def _facts(result: Mapping[str, Any]) -> Markup:
    manifest = facts.mapping(result, "manifest")
    target, workload = facts.mapping(manifest, "target"), facts.mapping(manifest, "workload")
    pairs = [
        ("measured", facts.text(result, "date")),
        (
            "through",
            " ".join(filter(None, (facts.text(target, "backend"), facts.text(target, "address")))),
        ),
        ("workload", facts.text(workload, "name")),
        ("workload's hash", facts.text(workload, "hash")),
        ("load", _describe_load(result)),
        ("limits", _describe_limits(facts.mapping(manifest, "limits"))),
        ("cache at the start", facts.text(manifest, "cache_state")),
        ("hardware", _describe_hardware(facts.mapping(manifest, "hardware"))),
        ("jax", facts.text(manifest, "jax_version")),
        ("jaxserve", facts.text(manifest, "jaxserve_version")),
        ("model's digest", facts.text(manifest, "bundle_digest")),
    ]
    return element(
        "dl",
        {"class": "facts"},
        *(
            element("div", {}, element("dt", {}, name), element("dd", {}, shorten(value, 160)))
            for name, value in pairs
            if value
        ),
    )


def _describe_load(result: Mapping[str, Any]) -> str:
    load = facts.mapping(result, "manifest", "offered_load")
    rate, concurrency = facts.number(load, "requests_per_s"), facts.number(load, "concurrency")
    number = facts.number(result, "manifest", "workload", "num_requests")
    requests = f", {say(number)} requests" if number else ""
    repeats = facts.number(result, "manifest", "repeats")
    times = f", {say(repeats)} repeats" if repeats and repeats > 1 else ""
    if facts.text(result, "kind") == "sweep":
        return f"{facts.text(load, 'arrivals')} loop, swept{requests}"
    if facts.text(load, "arrivals") == "closed":
        return f"closed loop, {say(concurrency)} in flight{requests}{times}"
    how = "all at once" if rate is None else f"{say(rate)} requests/s"
    return f"open loop, {how}{requests}{times}"


def _describe_limits(limits: Mapping[str, Any]) -> str:
    parts = [", ".join(map(str, facts.items(limits, "all")))]
    for name, own in facts.mapping(limits, "classes").items():
        parts.append(f"{name}: {', '.join(map(str, own if isinstance(own, list) else ()))}")
    return "; ".join(filter(None, parts)) or "none: every ok request is compliant"


def _describe_hardware(hardware: Mapping[str, Any]) -> str:
    return ", ".join(
        f"{name.removesuffix('_bytes')} {say_bytes(facts.number(value))}"
        if name.endswith("_bytes") and facts.number(value) is not None
        else f"{name} {value}"
        for name, value in hardware.items()
    )


def _warnings(warnings: Sequence[Any]) -> Markup:
    if not warnings:
        return Markup("")
    return element(
        "ul",
        {"class": "warnings", "aria-label": "warnings"},
        *(element("li", {}, shorten(str(warning), 600)) for warning in warnings[:MAX_WARNINGS]),
    )


_Tile = tuple[str, str, str]


def _tiles(tiles: Sequence[_Tile]) -> Markup:
    return element(
        "div",
        {"class": "tiles"},
        *(
            element(
                "div",
                {"class": "tile"},
                element("div", {"class": "name"}, name),
                element("div", {"class": "value"}, value),
                element("div", {"class": "more"}, more),
            )
            for name, value, more in tiles
        ),
    )


def _run_tiles(result: Mapping[str, Any]) -> Sequence[_Tile]:
    goodput = facts.mapping(result, "goodput")
    sent, ok = (facts.number(result, "outcomes", name) for name in ("sent", "ok"))
    lag = facts.mapping(result, "latency", "send_lag")
    tiles = [
        (
            facts.text(goodput, "label") or "goodput (no quality gate)",
            f"{say(facts.number(goodput, 'tokens_per_s'))} tokens/s",
            _interval(result, "goodput"),
        ),
        (
            "raw throughput",
            f"{say(facts.number(goodput, 'raw_tokens_per_s'))} tokens/s",
            _interval(result, "raw_throughput"),
        ),
        (
            "attainment",
            say_share(facts.number(goodput, "attainment")),
            f"{say(facts.number(goodput, 'compliant_requests'))} of {say(sent)} requests",
        ),
        ("ok requests", say(ok), f"of {say(sent)} sent"),
    ]
    for name, title in (
        ("ttft", "time to first token"),
        ("itl", "inter-token latency"),
        ("e2e", "end to end"),
    ):
        p50, p95, p99 = (
            facts.number(result, "latency", name, part) for part in ("p50", "p95", "p99")
        )
        if p50 is not None:
            tiles.append(
                (f"{title}, p95", say_time(p95), f"p50 {say_time(p50)} · p99 {say_time(p99)}")
            )
    tiles.append(("send lag, p99", say_time(facts.number(lag, "p99")), "how late this tool was"))
    joules = facts.number(result, "energy", "per_compliant_token")
    if joules is not None:
        tiles.append(("energy", f"{say(joules)} J", "per compliant output token"))
    hit_rate = facts.number(result, "tokens", "hit_rate")
    if hit_rate is not None:
        tiles.append(("prompt tokens from a cache", say_share(hit_rate), "hit rate"))
    return tiles


def _interval(result: Mapping[str, Any], name: str) -> str:
    low, high = (
        facts.number(result, "repeats", "intervals", name, part) for part in ("low", "high")
    )
    if low is None or high is None:
        return "one repeat: no interval"
    return f"95 %: {say(low)} to {say(high)}"


def _sweep_tiles(result: Mapping[str, Any]) -> Sequence[_Tile]:
    wanted = say_share(facts.number(result, "search", "attainment"))
    tiles = []
    for name, title in (
        ("best", f"highest load at {wanted}"),
        ("highest_goodput", "highest goodput"),
    ):
        point = facts.mapping(result, name)
        if not point:
            tiles.append((title, "none", "no point met it"))
            continue
        rate = facts.number(point, "requests_per_s")
        concurrency = facts.number(point, "concurrency")
        load = f"{say(rate)} requests/s" if rate is not None else f"{say(concurrency)} in flight"
        about = (
            f"{say(facts.number(point, 'goodput'))} tokens/s goodput, "
            f"{say(facts.number(point, 'raw_throughput'))} raw, attainment "
            f"{say_share(facts.number(point, 'attainment'))}"
        )
        tiles.append((title, load, about))
    resolution = say_share(facts.number(result, "search", "resolution"))
    is_within = facts.get(result, "is_within_resolution") is True
    tiles.append(
        (
            "the search",
            "ended" if is_within else "cut short",
            f"answer {'within' if is_within else 'not within'} {resolution} of the next load",
        )
    )
    return tiles
