"""The page: self-contained, well-formed, whole, and safe with any string in a result."""

import json
from pathlib import Path
from typing import Any

import pytest

from jaxserve.errors import ResultError
from jaxserve.measure.report import build_sections, write_report
from jaxserve.measure.report.page import build_page, build_plain_page
from jaxserve.measure.report.svg import WIDTH
from jaxserve.measure.result import JsonObject
from tests.measure.report.example import build_sweep, write_run
from tests.measure.report.page_facts import (
    extents,
    figures,
    loads,
    num_marks,
    parse,
    table_rows,
)

RUN_FIGURES = {
    "cdf-ttft", "cdf-itl", "cdf-gap", "cdf-tpot", "cdf-e2e", "outcomes", "attainment",
    "time-arrivals", "time-in-flight", "time-tokens", "time-queue", "time-rows", "time-kv",
    "time-memory", "request-phases", "host-phases", "device-time", "bucket-heat", "bucket-tokens",
}  # fmt: skip
SWEEP_FIGURES = {
    "sweep-goodput", "sweep-attainment", "sweep-ttft", "sweep-itl", "sweep-tpot", "sweep-e2e",
}  # fmt: skip
EVIL = "</title></style><script>alert(1)</script>\"'><img src=x onerror=alert(1)>&\x00\u202e\ud800"
SAMPLE = Path(__file__).parent.parent / "sample_result.json"


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_run(tmp_path_factory.mktemp("run"))


@pytest.fixture(scope="module")
def page(run: Path) -> str:
    return write_report(run).read_text(encoding="utf-8")


def page_of(result: JsonObject, requests: Path | None = None) -> str:
    return build_page(result, build_sections(result, requests))


def read(path: Path) -> Any:  # noqa: ANN401  # JSON
    return json.loads(path.read_text(encoding="utf-8"))


def test_the_page_of_a_run_is_well_formed_and_loads_nothing(page: str) -> None:
    assert loads(parse(page), page) == []
    assert "default-src &#x27;none&#x27;" in page


def test_the_page_of_a_sweep_is_well_formed_and_loads_nothing() -> None:
    page = page_of(build_sweep())
    assert loads(parse(page), page) == []


@pytest.mark.parametrize("addition", ['<img src="x"/>', '<p onclick="x()"/>', "<script/>"])
def test_what_loads_or_runs_would_be_found(page: str, addition: str) -> None:
    changed = page.replace("</main>", f"{addition}</main>")
    assert loads(parse(changed), changed)


def test_a_run_has_every_figure_each_with_data_and_a_table_of_its_numbers(page: str) -> None:
    found = figures(parse(page))
    assert set(found) == RUN_FIGURES
    for figure in found.values():
        assert num_marks(figure) > 0
        assert table_rows(figure)


def test_a_sweep_has_every_figure_each_with_data_and_a_table_of_its_numbers() -> None:
    found = figures(parse(page_of(build_sweep())))
    assert set(found) == SWEEP_FIGURES
    for figure in found.values():
        assert num_marks(figure) > 0
        assert len(table_rows(figure)) == 6


def test_every_drawing_has_a_title_and_a_description_that_are_its_label(page: str) -> None:
    root = parse(page)
    ids = [element.attrib["id"] for element in root.iter() if "id" in element.attrib]
    assert len(ids) == len(set(ids))
    drawings = [svg for svg in root.iter("svg") if svg.attrib.get("class") == "plot"]
    assert len(drawings) == len(RUN_FIGURES)
    for svg in drawings:
        assert svg.attrib["role"] == "img"
        labels = svg.attrib["aria-labelledby"].split()
        texts = {element.attrib["id"]: element.text for element in svg if "id" in element.attrib}
        assert all(texts[label] for label in labels)


def test_nothing_is_drawn_outside_of_its_drawing(page: str) -> None:
    sample = read(SAMPLE)
    name = "a class with a name that is rather long"
    limits = [f"ttft={value}" for value in (0.01, 0.3, 0.45, 0.6, 2)]
    sample["manifest"]["limits"] = {
        "all": ["e2e=1"], "classes": {f"{name} {text}": [text] for text in limits}
    }  # fmt: skip
    for one in (page, page_of(build_sweep()), page_of(read(SAMPLE)), page_of(sample)):
        found = list(extents(parse(one)))
        assert len(found) > 60
        outside = [
            place for place in found
            if not (place[0] >= -1 and place[1] <= WIDTH + 1 and 0 <= place[2] <= place[3])
        ]  # fmt: skip
        assert outside == []


def test_no_string_of_a_result_becomes_markup(tmp_path: Path) -> None:
    path = write_run(tmp_path, number=30, repeats=1)
    lines = (tmp_path / "requests.jsonl").read_text(encoding="utf-8").splitlines()
    records = [json.loads(line) for line in lines]
    for record in records:
        record["prompt_class"] = f"{record['prompt_class']}{EVIL}"
        record["error"] = record["error"] and EVIL
    text = "\n".join(map(json.dumps, records))
    (tmp_path / "requests.jsonl").write_text(text + "\n", encoding="utf-8")
    result = poisoned(read(path))
    result["manifest"]["limits"] = {"all": ["ttft=1"], "classes": {f"chat{EVIL}": ["ttft=0.5"]}}
    page = page_of(result, tmp_path / "requests.jsonl")
    root = parse(page)
    assert loads(root, page) == []
    assert [element for element in root.iter("title") if "alert" in (element.text or "")]
    texts = "".join(root.itertext())
    assert "<script>alert(1)</script>" in texts  # shown as it is
    assert "\x00" not in page
    assert "\u202e" not in page
    assert page.encode()  # a lone surrogate could not be written


def poisoned(value: Any) -> Any:  # noqa: ANN401  # any JSON value
    """Returns a result with hostile strings in every place, keys too, but where code reads them."""
    kept = {"kind", "limits"}
    match value:
        case dict():
            changed = {key: part if key in kept else poisoned(part) for key, part in value.items()}
            return changed | {EVIL: EVIL}
        case list():
            return [poisoned(part) for part in value]
        case str():
            return value + EVIL
    return value


def test_hostile_strings_of_a_sweep_do_not_become_markup() -> None:
    result = poisoned(build_sweep())
    page = page_of(result)
    assert loads(parse(page), page) == []


def test_without_its_requests_a_run_shows_what_the_result_tells_and_says_so(run: Path) -> None:
    root = parse(page_of(read(run)))
    found = figures(root)
    assert {"cdf-ttft", "outcomes", "attainment", "time-queue", "request-phases"} <= set(found)
    assert "time-tokens" not in found
    assert "the requests' file is not beside the result" in "".join(root.itertext())


def test_requests_of_another_run_are_not_used(run: Path, tmp_path: Path) -> None:
    write_run(tmp_path, number=10, repeats=1)
    root = parse(page_of(read(run), tmp_path / "requests.jsonl"))
    assert "has 10 requests, but the result 300: not its own" in "".join(root.itertext())
    assert "time-tokens" not in figures(root)


def test_a_server_that_tells_nothing_is_said_not_drawn(run: Path) -> None:
    result = read(run)
    result["server"] = None
    for sample in result["timeline"]:
        sample |= {"running": None, "waiting": None, "kv_usage": None, "memory_bytes": None}
    root = parse(page_of(result, run.with_name("requests.jsonl")))
    gone = {
        "time-queue", "time-rows", "time-kv", "time-memory", "host-phases", "device-time",
        "bucket-heat", "bucket-tokens",
    }  # fmt: skip
    assert set(figures(root)) == RUN_FIGURES - gone
    text = "".join(root.itertext())
    for name in ("Queue", "KV use", "Host phases of steps", "Buckets"):
        assert f"Not shown: {name}: the server does not tell" in text


@pytest.mark.parametrize(
    "result", [{}, {"kind": "sweep"}, {"kind": "sweep", "points": [{}, 3]}, {"timeline": 7}]
)
def test_a_result_with_nothing_in_it_still_makes_a_page(result: JsonObject) -> None:
    root = parse(page_of({"schema_version": 1, **result}))
    assert figures(root) == {}
    assert "Not shown" in "".join(root.itertext())


def test_numbers_that_are_none_are_not_drawn(run: Path) -> None:
    result = read(run)
    result["latency"]["ttft"] = {
        "p50": float("nan"),
        "p95": "high",
        "max": float("inf"),
        "p99": True,
    }
    assert "cdf-ttft" not in figures(parse(page_of(result)))


def test_a_page_hardly_grows_with_the_requests(page: str, tmp_path: Path) -> None:
    larger = write_report(write_run(tmp_path, number=1500, rate=3.0, repeats=2, tokens=6))
    assert larger.stat().st_size < 1.3 * len(page.encode())
    assert larger.stat().st_size < 300_000


def test_many_classes_and_errors_do_not_make_a_page_large(run: Path) -> None:
    result = read(run)
    one = next(iter(result["attainment"]["classes"].values()))
    result["attainment"]["classes"] = {"x" * 5000 + str(place): one for place in range(5000)}
    result["warnings"] = ["w" * 10_000] * 1000
    result["manifest"]["config"] = {str(place): "y" * 5000 for place in range(5000)}
    assert len(page_of(result)) < 2_000_000


def test_the_page_is_beside_the_result_by_its_name(run: Path, tmp_path: Path) -> None:
    sweep = tmp_path / "sweep.json"
    sweep.write_text(json.dumps(build_sweep()), encoding="utf-8")
    assert write_report(tmp_path) == tmp_path / "sweep.html"
    assert write_report(run.parent) == run.with_name("result.html")
    assert write_report(run, tmp_path / "here.html") == tmp_path / "here.html"
    assert not list(tmp_path.glob("*.part"))


def test_what_is_not_a_result_is_refused(tmp_path: Path) -> None:
    (tmp_path / "x.json").write_text("[]", encoding="utf-8")
    with pytest.raises(ResultError, match="is not a result"):
        write_report(tmp_path / "x.json")


def test_a_page_that_cannot_be_written_is_one_error(run: Path, tmp_path: Path) -> None:
    with pytest.raises(ResultError, match=r"there/x\.html cannot be written"):
        write_report(run, tmp_path / "there" / "x.html")


def test_figures_of_no_one_result_have_a_page_too() -> None:
    sections = build_sections(build_sweep())
    page = build_plain_page(f"Many {EVIL}", [f"by {EVIL}"], sections)
    root = parse(page)
    assert set(figures(root)) == SWEEP_FIGURES
    assert not loads(root, page)
