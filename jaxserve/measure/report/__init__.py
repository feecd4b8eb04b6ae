"""A report: a result, and the requests beside it, as one page of HTML."""

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from jaxserve.errors import ResultError
from jaxserve.measure.limits import Limits, read_limits
from jaxserve.measure.report import (
    facts,
    latency_figures,
    outcome_figures,
    phase_figures,
    server_figures,
    sweep_figures,
    timeline_figures,
)
from jaxserve.measure.report.figures import Figure, Section
from jaxserve.measure.report.observed import Observed
from jaxserve.measure.report.page import build_page
from jaxserve.measure.report.png import write_pngs
from jaxserve.measure.request_lines import REQUESTS_FILE, read_records
from jaxserve.measure.result import RESULT_FILE, read_result

SWEEP_FILE: Final = "sweep.json"


def write_report(
    result_path: Path, output: Path | None = None, *, png_folder: Path | None = None
) -> Path:
    """Writes the page of a run or a sweep and returns where it is.

    Args:
      result_path: the result, or the folder it is in; the requests are read from beside it.
      output: None is beside the result, by its name: `result.html`, `sweep.html`.
      png_folder: gets each figure as a PNG too; None is none.

    Raises:
      ResultError: a file cannot be read or written, or is something else.
      ConfigError: PNGs are asked for without matplotlib.
    """
    result_file = _find_result(result_path)
    result = read_result(result_file)
    sections = build_sections(result, _find_requests(result_file))
    page = build_page(result, sections)
    output = result_file.with_suffix(".html") if output is None else output
    part = output.with_name(f"{output.name}.part")
    try:
        part.write_text(page, encoding="utf-8")
        os.replace(part, output)
    except OSError as error:
        raise ResultError(f"{output} cannot be written: {error.strerror}") from error
    if png_folder is not None:
        write_pngs(figures_of(sections), png_folder)
    return output


def build_sections(result: Mapping[str, Any], requests_file: Path | None = None) -> list[Section]:
    """Returns what the page shows of a result.

    Raises:
      ResultError: the requests' file is something else.
      ConfigError: the result's limits are none.
    """
    limits = _read_limits(result)
    if facts.text(result, "kind") == "sweep":
        return [sweep_figures.build_section(result, limits)]
    observed, note = _observe(result, requests_file, limits)
    sections = [
        latency_figures.build_section(result, observed, limits),
        outcome_figures.build_section(result, observed),
        timeline_figures.build_section(result, observed),
        phase_figures.build_section(result, observed),
        server_figures.build_section(result),
    ]
    if note:
        sections.insert(0, Section(key="note", title="Requests", absent=[note]))
    return sections


def figures_of(sections: Sequence[Section]) -> list[Figure]:
    return [figure for section in sections for figure in section.figures]


def _find_result(path: Path) -> Path:
    if not path.is_dir():
        return path
    sweep = path / SWEEP_FILE
    return sweep if sweep.is_file() else path / RESULT_FILE


def _find_requests(result_file: Path) -> Path | None:
    """Returns the requests' file beside a run's or a sweep point's; None where there is none."""
    stem = result_file.name.removesuffix(RESULT_FILE)
    is_run = stem != result_file.name
    path = result_file.with_name(
        f"{stem}{REQUESTS_FILE}" if is_run else f"{result_file.stem}.{REQUESTS_FILE}"
    )
    return path if path.is_file() else None


def _read_limits(result: Mapping[str, Any]) -> Limits:
    limits = facts.mapping(result, "manifest", "limits")
    classes = facts.mapping(limits, "classes")
    return read_limits(
        map(str, facts.items(limits, "all")),
        {name: [str(text) for text in facts.items(classes, name)] for name in classes},
    )


def _observe(
    result: Mapping[str, Any], path: Path | None, limits: Limits
) -> tuple[Observed | None, str]:
    """Returns what the requests' file says, and why it says nothing."""
    if path is None:
        return None, "the requests' file is not beside the result, so curves have few points."
    observed = Observed(limits, repeat=timeline_figures.choose_repeat(result))
    try:
        observed.take(read_records(path))
    except OSError as error:
        raise ResultError(f"{path} cannot be read: {error.strerror}") from error
    found, sent = observed.num_by_class.total(), facts.count(result, "outcomes", "sent")
    if found != sent:
        return None, f"{path.name} has {found} requests, but the result {sent:g}: not its own."
    return observed, ""
