"""`jaxserve report`."""

import importlib.util
from pathlib import Path

import pytest

from jaxserve.cli.main import main
from tests.measure.report.example import write_run


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_run(tmp_path_factory.mktemp("run"), number=40, repeats=1)


def test_it_writes_a_page_and_says_where(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["report", str(run.parent)]) == 0
    page = run.with_name("result.html")
    assert capsys.readouterr().out == f"{page}\n"
    assert page.read_text(encoding="utf-8").startswith("<!DOCTYPE html>")


def test_without_matplotlib_a_png_is_one_line_that_names_the_extra(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    page = tmp_path / "x.html"
    assert main(["report", str(run), "-o", str(page), "--png", str(tmp_path / "figures")]) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1
    assert "jaxserve[plots]" in error
    assert not page.exists()


def test_with_matplotlib_each_figure_is_a_png(run: Path, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    page, folder = tmp_path / "x.html", tmp_path / "figures"
    assert main(["report", str(run), "-o", str(page), "--png", str(folder)]) == 0
    names = {path.stem for path in folder.iterdir()}
    text = page.read_text(encoding="utf-8")
    assert len(names) == 19
    assert all(f'<figure id="{name}">' in text for name in names)
    assert all(path.read_bytes().startswith(b"\x89PNG") for path in folder.iterdir())


def test_a_file_that_is_not_there_is_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["report", str(tmp_path / "none.json")]) == 1
    error = capsys.readouterr().err
    assert error.count("\n") == 1
    assert "none.json cannot be read" in error
