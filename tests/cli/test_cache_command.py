"""`jaxserve cache explain`: what it says is what the engine does."""

import json
from collections.abc import Sequence
from pathlib import Path

import pytest

from jaxserve.cli.cache import explain_why
from jaxserve.cli.main import main
from jaxserve.config import Config
from jaxserve.engine.cache_explain import build_namespaces, explain_sharing
from tests.checkpoint.writers import T1, make_weights, write_hf
from tests.engines import ask, build_engine, gather, serve

CONFIG = Config.model_validate({"kv": {"page_size": 4}})
IDENTITY = build_namespaces(CONFIG).find_identity("", "", prompt_len=1)
PAIRS = [
    ((1, 2, 3), (1, 2, 3)),
    (tuple(range(17)), tuple(range(17))),
    (tuple(range(17)), tuple(range(16))),
    (tuple(range(12)), (*range(10), 90, 91)),
    (tuple(range(10)), tuple(range(18))),
    (tuple(range(9)), (50, *range(1, 9))),
    ((1,), (1,)),
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_hf(tmp_path_factory.mktemp("models") / "tiny", T1, make_weights(T1))


def explain(
    folder: Path, capsys: pytest.CaptureFixture[str], *options: str
) -> tuple[int, str, str]:
    code = main(["cache", "explain", str(folder), "--set", "kv.page_size=4", *options])
    captured = capsys.readouterr()
    return code, captured.out, captured.err


@pytest.mark.parametrize(("first", "second"), PAIRS)
def test_it_says_what_the_engine_does(first: tuple[int, ...], second: tuple[int, ...]) -> None:
    engine, runner = build_engine(num_pages=40)
    with serve(engine, runner):
        gather(engine.submit(ask(first, max_tokens=8, ignore_eos=True)))
        done = gather(engine.submit(ask(second, max_tokens=1)))
    told = explain_sharing((first, IDENTITY), (second, IDENTITY), page_size=4)
    assert len(second) - told.num_computed == done.finished.usage.cached_prompt_tokens
    assert told.num_pages * 4 + told.num_copied + told.num_computed == len(second)


def test_prompts_with_a_common_beginning_share_it_up_to_where_they_differ(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    code, out, err = explain(folder, capsys, "--prompts", "abcdefgh one", "abcdefgh two")
    assert (code, err) == (0, "")
    assert "the first 10 the same" in out
    assert "shared: 2 pages of 4, 2 of the next page are copied; 3 of the second's" in out
    assert "why: they differ from there on" in out
    assert out.splitlines()[-1] == "token 10: 'o' and 't'"


@pytest.mark.parametrize(
    ("options", "why"),
    [
        (["--tenants", "acme", "bolt"], "the tenants differ"),
        (["--salts", "x", ""], "the salts differ ('x' and None)"),
        (["--set", "prefix_cache.enabled=false"], "prefix_cache.enabled is false"),
        ([], "all of the second is there"),
    ],
)
def test_what_keeps_them_apart_is_named(
    folder: Path, capsys: pytest.CaptureFixture[str], options: list[str], why: str
) -> None:
    code, out, _ = explain(
        folder, capsys, "--json", "--prompts", "abcdefgh one", "abcdefgh one", *options
    )
    told = json.loads(out)
    assert code == 0
    assert why in told["why"]
    assert (told["num_pages"] > 0) is not bool(options)


@pytest.mark.parametrize(
    ("first", "second", "why"),
    [
        (range(17), range(17), "up to its last token"),
        (range(17), (*range(16), 90), "up to its last token"),
        (range(19), (*range(17), 90), "1 token more is the same, but less than a quarter"),
        (range(3), (*range(3), 90), "3 tokens more are the same, but less than a quarter"),
        (range(3), range(3), "2 tokens more are the same, but less than a quarter"),
        (range(17), (90,), "up to its last token"),
        (range(17), (90, 91), "they differ from there on"),
        (range(16), range(20), "the first ends there"),
    ],
)
def test_why_no_more_is_shared_is_what_decides_it(
    first: Sequence[int], second: Sequence[int], why: str
) -> None:
    told = explain_sharing((first, IDENTITY), (second, IDENTITY), page_size=16)
    assert why in explain_why(told, CONFIG)


def test_a_shared_namespace_shares(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    team = 'prefix_cache.shared_namespaces={"team": ["acme", "bolt"]}'
    tenants = ["--tenants", "acme", "bolt", "--set", team]
    _, out, _ = explain(folder, capsys, "--prompts", "abcdefgh", "abcdefgh", *tenants)
    assert "shared: 2 pages of 4; 1 of the second's tokens are computed" in out
    _, out, _ = explain(
        folder, capsys, "--prompts", "abcdefgh", "abcdefgh", "--tenants", "acme", "core", "--set",
        team,
    )  # fmt: skip
    assert "one of the tenants has a namespace with others" in out


def test_a_prompts_length_may_keep_them_apart() -> None:
    namespaces = build_namespaces(CONFIG, changing_ropes=(("dynamic", 8),))
    first, second = tuple(range(10)), tuple(range(12))
    told = explain_sharing(
        (first, namespaces.find_identity("", "", prompt_len=10)),
        (second, namespaces.find_identity("", "", prompt_len=12)),
        page_size=4,
    )
    assert (told.num_pages, told.differs_in) == (0, "positions")
    assert "follow the prompt's length" in explain_why(told, CONFIG)


def test_files_are_read_and_faults_are_one_line(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    first, second = tmp_path / "a", tmp_path / "b"
    first.write_text("abcdefgh")
    code, _, err = explain(folder, capsys, "--files", str(first), str(second))
    assert code == 1
    assert err.count("\n") == 1
    assert "No such file" in err
    second.write_bytes(b"\xff")
    assert "not UTF-8 at byte 0" in explain(folder, capsys, "--files", str(first), str(second))[2]
