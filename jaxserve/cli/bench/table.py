"""A result as a summary that fits 80 columns."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final

from jaxserve.measure.compare import Change, Difference
from jaxserve.measure.goodput import OUTCOMES

LATENCIES: Final = (
    "ttft", "itl", "tpot", "e2e", "queue", "prefill", "decode", "delivery", "send_lag"
)  # fmt: skip
COLUMNS: Final = ("mean", "p50", "p95", "p99")
WIDTH: Final = 80


def summarize(result: Mapping[str, Any]) -> str:
    """Returns the lines of a benchmark's result."""
    lines = [
        *_heading(result["manifest"]),
        "",
        *_rates(result),
        "",
        *_attainment(result["attainment"]),
        *_requests(result["outcomes"]),
        "",
        *_latencies(result["latency"]),
        *_server(result),
    ]
    for warning in result["warnings"]:
        lines += ["", *_wrap(f"! {warning}")]
    return "\n".join(line.rstrip() for line in lines)


def _heading(manifest: Mapping[str, Any]) -> Iterator[str]:
    load, target, workload = (manifest[key] for key in ("offered_load", "target", "workload"))
    if load["arrivals"] == "closed":
        rate = f"closed loop, {load['concurrency']} at a time"
    elif load["requests_per_s"] is None:
        rate = "open loop, all at once"
    else:
        rate = f"open loop, {load['requests_per_s']:.3g} requests/s"
    name = f"{_cut(workload['name'], 20)} ({workload['hash'][:8]})"
    yield f"workload  {name}: {workload['num_requests']} requests, {rate}"[:WIDTH]
    where = f" at {target['address']}" if target["address"] else ""
    yield f"target    {target['backend']}{where}: {target['model']}"[:WIDTH]


def _rates(result: Mapping[str, Any]) -> Iterator[str]:
    goodput, intervals = result["goodput"], result["repeats"]["intervals"]
    rows = (
        (goodput["label"], goodput["tokens_per_s"], "goodput"),
        ("raw throughput", goodput["raw_tokens_per_s"], "raw_throughput"),
    )
    for label, value, name in rows:
        yield f"{label:<26}{value:>10.1f} tokens/s{_interval(intervals.get(name))}"
    window_s = goodput["peak_window_s"]
    yield f"{'  peak':<26}{goodput['peak_tokens_per_s']:>10.1f} tokens/s  (over {window_s:.2f} s)"
    yield f"{'duration':<26}{goodput['duration_s']:>10.1f} s"


def _interval(interval: Mapping[str, Any] | None) -> str:
    if not interval or interval["low"] is None:
        return ""
    low, high, count = interval["low"], interval["high"], interval["num_repeats"]
    return f"  ({low:.1f} to {high:.1f}: 95 %, {count} repeats)"


def _attainment(attainment: Mapping[str, Any]) -> Iterator[str]:
    whole, classes = attainment["all"], attainment["classes"]
    names = [name for name in classes if len(classes) > 1 or name]
    heads = ["all", *names][:5]
    yield f"{'limits met by':<26}" + "".join(f"{_cut(head, 10):>10}" for head in heads)
    columns = [whole, *(classes[name] for name in names)][:5]
    limits = sorted({limit for column in columns for limit in column["limits"]})
    for limit in limits:
        shares = (column["limits"].get(limit) for column in columns)
        cells = ("" if share is None else _percent(share["share"]) for share in shares)
        yield f"  {_cut(limit, 24):<24}" + "".join(f"{cell:>10}" for cell in cells)
    yield f"{'  all of them, and ok':<26}" + "".join(
        f"{_percent(column['share']):>10}" for column in columns
    )


def _requests(outcomes: Mapping[str, Any]) -> Iterator[str]:
    parts = [f"{outcomes[name]} {name.replace('_', ' ')}" for name in OUTCOMES]
    empty = f" ({outcomes['empty']} empty)" if outcomes["empty"] else ""
    yield f"requests  {outcomes['sent']} sent: {', '.join(parts)}{empty}"


def _latencies(latencies: Mapping[str, Any]) -> Iterator[str]:
    yield f"{'seconds':<26}" + "".join(f"{name:>10}" for name in COLUMNS)
    for name in LATENCIES:
        found = latencies[name]
        if found["count"]:
            cells = "".join(f"{found[column]:>10.4f}" for column in COLUMNS)
            yield f"  {name.replace('_', ' '):<24}{cells}"


def _server(result: Mapping[str, Any]) -> Iterator[str]:
    server, tokens = result["server"], result["tokens"]
    yield ""
    if server is None:
        yield f"hit rate  {_percent(tokens['hit_rate'])}; the server's metrics were not to be had"
        return
    memory, compiles = server["peak_memory_bytes"], server["compiles"]["while_serving"]
    facts = [
        f"rows used {_percent(server['row_occupancy'])}",
        f"KV peak {_percent(server['kv_usage_peak'])}",
        f"hit rate {_percent(tokens['hit_rate'])}",
        f"padding {_percent(server['padding_share'])}",
        f"host gap {_percent(server['host_gap_share'])}",
        f"{len(server['buckets'])} buckets ran",
        f"captured {_percent(server['captured_share'])}",
        f"{'unknown' if compiles is None else round(compiles)} compiles while serving",
        f"peak memory {'unknown' if memory is None else f'{memory / 2**30:.2f} GiB'}",
    ]
    yield from _wrap(f"server    {' · '.join(facts)}")
    yield from _wrap(f"energy    {_energy(result['energy'])}")


def _energy(energy: Mapping[str, Any]) -> str:
    missing = "; ".join(f"{part}: {why}" for part, why in energy["missing"].items())
    if energy["joules"] is None:
        return f"not known ({missing})"
    each = energy["per_compliant_token"]
    by_token = "no compliant token" if each is None else f"{each:.3g} J by compliant token"
    parts = ", ".join(energy["parts"])
    return f"{energy['joules']:.0f} J ({parts}), {by_token}" + (f"; {missing}" if missing else "")


def summarize_sweep(sweep: Mapping[str, Any]) -> str:
    """Returns the lines of a sweep's result."""
    wanted = sweep["search"]["attainment"]
    lines = [
        f"{'scale':>10}{'requests/s':>12}{'attained':>10}{'goodput':>10}{'raw':>10}{'ttft p95':>10}"
    ]
    for point in sweep["points"]:
        rate, first = point["requests_per_s"], point["latency"]["ttft"]["p95"]
        mark = "" if point["attainment"] >= wanted else "  below"
        lines.append(
            f"{point['rate_scale']:>10.4g}"
            f"{'' if rate is None else f'{rate:.4g}':>12}"
            f"{_percent(point['attainment']):>10}"
            f"{point['goodput']:>10.1f}"
            f"{point['raw_throughput']:>10.1f}"
            f"{'' if first is None else f'{first:.3f}':>10}{mark}"
        )
    best, above = sweep["best"], sweep["lowest_that_failed"]
    lines.append("")
    if best is None:
        lines.append(f"no load attained {100 * wanted:g} %; the lowest tried was {above:.4g}")
    else:
        edge = "none failed" if above is None else f"{above:.4g} failed"
        lines.append(
            f"highest load that attained {100 * wanted:g} %: "
            f"scale {best['rate_scale']:.4g} ({edge})"
        )
        lines.append(f"its goodput (no quality gate): {best['goodput']:.1f} tokens/s")
    if not sweep["is_within_resolution"]:
        lines.append("! the search ended before its resolution: raise --max-points or --start")
    return "\n".join(line[:WIDTH] for line in lines)


def summarize_changes(changes: Sequence[Change], settings: Sequence[Difference]) -> str:
    """Returns the lines of a comparison."""
    lines = [f"setting   {difference}" for difference in settings]
    lines += [""] if lines else []
    lines.append(f"{'':<16}{'A':>10}{'B':>10}{'B / A':>9}   {'95 % interval':<18}")
    for change in changes:
        ratio = change.ratio
        interval = "needs repeats" if ratio.num_repeats < 2 else "none of a 0"
        if ratio.low is not None and ratio.high is not None:
            interval = f"{ratio.low:.3f} to {ratio.high:.3f}"
        lines.append(
            f"{change.name.replace('_', ' '):<16}{change.old:>10.4g}{change.new:>10.4g}"
            f"{ratio.value:>9.3f}   {interval:<18}{change.verdict}"
        )
    return "\n".join(lines)


def _percent(share: float | None) -> str:
    return "unknown" if share is None else f"{100 * share:.1f} %"


def _cut(text: str, width: int) -> str:
    return text if len(text) < width else f"{text[: width - 2]}…"


def _wrap(text: str) -> list[str]:
    """Returns the text in lines of at most WIDTH, later ones set in."""
    lines, line = [], ""
    for word in text.split(" "):
        if line and len(line) + 1 + len(word) > WIDTH:
            lines.append(line)
            line = f"          {word}"
        else:
            line = f"{line} {word}" if line else word
    return [*lines, line]
