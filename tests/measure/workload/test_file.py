"""Workload files: what is written is read, what is bad is named, and the hash is of the load."""

import dataclasses
import itertools
import json
import os
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import pytest

from jaxserve.errors import WorkloadError
from jaxserve.measure.workload import (
    Header,
    Prompt,
    Recipe,
    Workload,
    WorkloadEntry,
    load_workload,
    open_workload,
    save_workload,
    write_workload,
)
from jaxserve.measure.workload.entry import build_workload

HEADER: Final = Header(
    name="mixed",
    prompts="fixed",
    seed=3,
    source="made",
    licence="none",
    parameters={"rate": 2.0},
    lineage=({"step": "window", "hash": "ab"},),
    limits={"chat": ("ttft=0.5", "itl_p95=0.1")},
)
ENTRIES: Final = (
    WorkloadEntry(index=0, at_s=0.0, prompt=Recipe(num_tokens=5), wanted_tokens=3),
    WorkloadEntry(
        index=1,
        at_s=0.25,
        prompt=Recipe(num_tokens=10, block_tokens=4, blocks=("a", "b")),
        prompt_class="chat",
        wanted_tokens=7,
        deadline_s=2.5,
        priority=-1,
        sampling={"temperature": 0.5, "top_k": 4},
        group="g",
    ),
    WorkloadEntry(index=2, at_s=0.25, prompt=(4, 5, 6), sampling={"ignore_eos": True}),
    WorkloadEntry(index=3, at_s=1e-6 + 1, prompt="Grüße, \u2028 all", group="ü"),
)
MIXED: Final = build_workload(HEADER, ENTRIES)


def write_lines(path: Path, *objects: object) -> Path:
    path.write_text("".join(f"{json.dumps(found)}\n" for found in objects))
    return path


def problem_of(path: Path) -> str:
    with pytest.raises(WorkloadError) as caught:
        load_workload(path)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_what_is_saved_is_loaded(tmp_path: Path) -> None:
    save_workload(MIXED, tmp_path / "w.jsonl")
    assert load_workload(tmp_path / "w.jsonl") == MIXED
    assert [path.name for path in tmp_path.iterdir()] == ["w.jsonl"]


def test_a_file_is_replaced_only_when_that_is_asked_for(tmp_path: Path) -> None:
    path = tmp_path / "w.jsonl"
    path.write_text("precious")
    with pytest.raises(WorkloadError, match="is there already; --overwrite replaces it"):
        save_workload(MIXED, path)
    assert path.read_text() == "precious"
    save_workload(MIXED, path, replace=True)
    assert load_workload(path) == MIXED


def test_a_file_is_read_entry_by_entry(tmp_path: Path) -> None:
    save_workload(MIXED, tmp_path / "w.jsonl")
    with open_workload(tmp_path / "w.jsonl") as opened:
        assert opened.end is not None
        assert opened.end.num_entries == 4
        assert next(opened.entries) == ENTRIES[0]
        assert next(opened.entries) == ENTRIES[1]


def test_the_hash_does_not_depend_on_the_spelling(tmp_path: Path) -> None:
    save_workload(MIXED, tmp_path / "a.jsonl")
    random.seed(5)
    lines = []
    for line in (tmp_path / "a.jsonl").read_text().splitlines():
        pairs = list(json.loads(line).items())
        random.shuffle(pairs)
        lines.append(json.dumps(dict(pairs), indent=1, ensure_ascii=False).replace("\n", " \t"))
    text = "\n\n".join(lines).replace('"at_s":  0.25', '"at_s": 25.0e-2')
    text = text.replace('"at_s": 0.25', '"at_s": 2.5e-1').replace(
        '"prompt_tokens": 10', '"prompt_tokens": 1e1'
    )
    assert "2.5e-1" in text
    assert "1e1" in text
    (tmp_path / "b.jsonl").write_text(text)
    assert load_workload(tmp_path / "b.jsonl") == MIXED


def change_entry(**changes: Any) -> Callable[[Workload], Workload]:  # noqa: ANN401
    def change(workload: Workload) -> Workload:
        entries = list(workload.entries)
        entries[1] = dataclasses.replace(entries[1], **changes)
        return build_workload(workload.header, entries)

    return change


def change_header(**changes: Any) -> Callable[[Workload], Workload]:  # noqa: ANN401
    def change(workload: Workload) -> Workload:
        return build_workload(dataclasses.replace(workload.header, **changes), workload.entries)

    return change


def recipe(**changes: Any) -> Recipe:  # noqa: ANN401
    return Recipe(**{"num_tokens": 10, "block_tokens": 4, "blocks": ("a", "b"), **changes})


CHANGES: Final = {
    "at_s": change_entry(at_s=0.250001),
    "prompt_class": change_entry(prompt_class="code"),
    "wanted_tokens": change_entry(wanted_tokens=8),
    "no wanted_tokens": change_entry(wanted_tokens=None),
    "deadline_s": change_entry(deadline_s=2.6),
    "no deadline_s": change_entry(deadline_s=None),
    "priority": change_entry(priority=1),
    "sampling": change_entry(sampling={"temperature": 0.5, "top_k": 5}),
    "no sampling": change_entry(sampling={}),
    "group": change_entry(group="h"),
    "num_tokens": change_entry(prompt=recipe(num_tokens=11)),
    "block_tokens": change_entry(prompt=recipe(block_tokens=5)),
    "a key": change_entry(prompt=recipe(blocks=("a", "c"))),
    "fewer keys": change_entry(prompt=recipe(blocks=("a",))),
    "ids": change_entry(prompt=(1, 2)),
    "other ids": change_entry(prompt=(1, 3)),
    "a text": change_entry(prompt="ab"),
    "another text": change_entry(prompt="ac"),
    "an entry less": lambda w: build_workload(w.header, w.entries[:3]),
    "an entry twice": lambda w: build_workload(w.header, (*w.entries[:1], *w.entries)),
    "the order": lambda w: build_workload(w.header, [w.entries[i] for i in (0, 2, 1, 3)]),
    "the seed of fixed prompts": change_header(seed=4),
    "unique prompts": change_header(prompts="unique"),
    "a closed loop": change_header(arrivals="closed", concurrency=2),
    "its concurrency": change_header(arrivals="closed", concurrency=3),
}


def test_whatever_changes_the_load_changes_the_hash() -> None:
    hashes = {name: change(MIXED).content_hash for name, change in CHANGES.items()}
    hashes["as it was"] = MIXED.content_hash
    same = [
        pair for pair in itertools.combinations(hashes, 2) if hashes[pair[0]] == hashes[pair[1]]
    ]
    assert same == []


def test_the_hash_covers_every_field_of_an_entry() -> None:
    covered = {name.removeprefix("no ") for name in CHANGES} | {"index", "prompt"}
    assert {field.name for field in dataclasses.fields(WorkloadEntry)} <= covered


@pytest.mark.parametrize(
    "changes",
    [
        {"name": "other"},
        {"source": "elsewhere"},
        {"licence": "MIT"},
        {"parameters": {}},
        {"lineage": ()},
        {"limits": {}},
    ],
    ids=lambda changes: next(iter(changes)),
)
def test_where_it_comes_from_does_not_change_the_hash(changes: dict[str, object]) -> None:
    assert change_header(**changes)(MIXED).content_hash == MIXED.content_hash


def test_the_hash_is_the_same_on_every_machine() -> None:
    expected = "bd597583f960ff8a343a0229fb0af06a40fab7c2ade114613e70d29e46ee6ec1"
    assert MIXED.content_hash == expected


OPEN: Final = {"jaxserve_workload": 1}
GOOD: Final = {"at_s": 0, "prompt_tokens": 4, "wanted_tokens": 2}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"at_s": None}, "at_s is missing, but must be a number from 0 to 1e+09"),
        ({"at_s": "0"}, 'at_s is "0", but must be a number'),
        ({"at_s": -1}, "at_s is -1, but must be a number from 0"),
        ({"at_s": True}, "at_s is true"),
        ({"prompt_tokens": 0}, "prompt_tokens is 0, but must be a whole number of at least 1"),
        ({"prompt_tokens": True}, "prompt_tokens is true, but must be a whole number"),
        ({"prompt_tokens": 1.5}, "prompt_tokens is 1.5, but must be a whole number"),
        (
            {"token_ids": [1]},
            "of prompt_tokens, token_ids, text it has prompt_tokens and token_ids",
        ),
        ({"wanted_tokens": 0}, "wanted_tokens is 0, but must be a whole number of at least 1"),
        ({"wanted_token": 2}, "wanted_token is not known; did you mean wanted_tokens?"),
        ({"deadline_s": 0}, "deadline_s is 0, but must be a number from 1e-06"),
        ({"priority": 1 << 31}, "priority is 2147483648, but must be a whole number"),
        ({"prompt_class": 3}, "prompt_class is 3, but must be a text"),
        ({"group": "\ud800"}, "group holds a lone surrogate"),
        ({"sampling": {"temp": 1}}, "sampling.temp is not known; known are temperature"),
        ({"sampling": {"top_p": 2}}, "sampling.top_p is 2, but must be a number from 0 to 1"),
        ({"sampling": {"max_tokens": 2}}, "wanted_tokens and sampling.max_tokens are set"),
        ({"blocks": ["a"]}, "block_tokens is missing, but must be a number from"),
        ({"block_tokens": 4}, "block_tokens is set without blocks"),
        (
            {"blocks": ["a", "b"], "block_tokens": 4},
            "blocks has 2 keys, but fewer blocks of 4 hold all 4 tokens",
        ),
        ({"blocks": [1], "block_tokens": 4}, "blocks is [1], but must be a list of texts"),
    ],
    ids=str,
)
def test_a_bad_entry_is_named_with_what_is_allowed(
    changes: dict[str, object], message: str, tmp_path: Path
) -> None:
    bad = {name: value for name, value in {**GOOD, **changes}.items() if value is not None}
    end = {"end": {"num_entries": 2, "content_hash": ""}}
    path = write_lines(tmp_path / "w.jsonl", OPEN, GOOD, bad, end)
    assert f"{path}, line 3: {message}" in problem_of(path)


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (b"{", "it is not JSON: Expecting property name"),
        (b"[1]", "it is [1], but must be an object"),
        (b'{"at_s": NaN, "prompt_tokens": 1}', "NaN is not JSON"),
        (b'{"at_s": 1e999, "prompt_tokens": 1}', "at_s is Infinity, but must be a number"),
        (b'{"at_s": 0, "at_s": 1, "prompt_tokens": 1}', "at_s stands there twice"),
        (b'{"text": "\xff"}', "it is not UTF-8 at byte 11"),
        (b"[" * 100_000, "it is nested too deeply"),
        (b'{"at_s": 0, "prompt_tokens": ' + b"9" * 5000 + b"}", "a number of too many digits"),
        (b'{"at_s": 0, "text": "a"}', "text is the same in every run"),
        (b'{"at_s": 0, "token_ids": [1]}', "token_ids is the same in every run"),
    ],
    ids=lambda value: str(value)[:40],
)
def test_a_line_that_is_no_entry_is_named(line: bytes, message: str, tmp_path: Path) -> None:
    path = write_lines(tmp_path / "w.jsonl", OPEN, GOOD)
    path.write_bytes(path.read_bytes() + line + b'\n{"end":{"num_entries":2,"content_hash":""}}')
    assert f"{path}, line 3: " in problem_of(path)
    assert message in problem_of(path)


def test_all_bad_lines_are_counted_and_the_first_is_told(tmp_path: Path) -> None:
    bad = {"at_s": 0}
    end = {"end": {"num_entries": 9, "content_hash": ""}}
    path = write_lines(tmp_path / "w.jsonl", OPEN, *[bad, GOOD] * 8, end)
    assert problem_of(path).endswith("(and 7 more: lines 4, 6, 8, 10, 12, …)")
    with pytest.raises(WorkloadError) as caught:
        load_workload(path)
    assert len(caught.value.problems) == 8


@pytest.mark.parametrize(
    ("header", "message"),
    [
        ({"name": "x"}, "line 1: it has no jaxserve_workload, so this is no workload"),
        ({"jaxserve_workload": 2}, "jaxserve_workload is 2, but this version reads 1"),
        ({"jaxserve_workload": 1, "arrival": 1}, "arrival is not known; did you mean arrivals?"),
        ({**OPEN, "arrivals": "half"}, 'arrivals is "half", but must be open or closed'),
        ({**OPEN, "arrivals": "closed"}, "concurrency is missing, but must be a whole number"),
        ({**OPEN, "concurrency": 2}, "concurrency is set, but only a closed loop has one"),
        ({**OPEN, "seed": -1}, "seed is -1, but must be"),
        ({**OPEN, "limits": {"a": "ttft=1"}}, 'limits.a is "ttft=1", but must be a list'),
        ({**OPEN, "limits": {"a": ["ttf=1"]}}, "limits: limit 'ttf=1' is not one; write"),
    ],
    ids=str,
)
def test_a_bad_header_is_named(header: dict[str, object], message: str, tmp_path: Path) -> None:
    end = {"end": {"num_entries": 1, "content_hash": ""}}
    assert message in problem_of(write_lines(tmp_path / "w.jsonl", header, GOOD, end))


def test_entries_are_sorted_and_a_closed_loop_has_no_times(tmp_path: Path) -> None:
    end = {"end": {"num_entries": 2, "content_hash": ""}}
    late = {**GOOD, "at_s": 2}
    path = write_lines(tmp_path / "a.jsonl", OPEN, late, GOOD, end)
    assert "line 3: at_s is 0.0, but the entry before has 2.0; sort them" in problem_of(path)
    closed = {**OPEN, "arrivals": "closed", "concurrency": 4}
    path = write_lines(tmp_path / "b.jsonl", closed, GOOD, late, end)
    assert "line 3: at_s is 2.0, but in a closed loop it must be 0" in problem_of(path)


def test_a_cut_or_changed_file_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "w.jsonl"
    save_workload(MIXED, path)
    lines = path.read_bytes().splitlines(keepends=True)
    for cut in (lines[:-1], lines[:3], [*lines[:-1], lines[-1][:30]], [*lines, lines[1]]):
        path.write_bytes(b"".join(cut))
        assert "its last line is not its end, so it was cut" in problem_of(path)
    path.write_bytes(b"".join([*lines, lines[-2], lines[-1]]))
    assert "line 7: it stands after the end; leave it out" in problem_of(path)
    path.write_bytes(b"".join(lines[:2] + lines[3:]))
    assert "has 3 entries, not 4: it was changed" in problem_of(path)
    path.write_bytes(b"".join(lines).replace(b'"priority":-1', b'"priority":-2'))
    assert "has the content hash" in problem_of(path)
    path.write_bytes(b"")
    assert "is empty, but a workload begins with its header" in problem_of(path)
    assert "cannot be read: No such file" in problem_of(tmp_path / "nowhere")


def test_an_unfinished_write_leaves_nothing(tmp_path: Path) -> None:
    bad, new = write_lines(tmp_path / "bad.jsonl", OPEN, GOOD, {}), tmp_path / "new.jsonl"
    with open_workload(bad, needs_end=False) as opened:
        with pytest.raises(WorkloadError, match="line 3"):
            write_workload(new, opened.header, opened.entries)
    assert [path.name for path in tmp_path.iterdir()] == ["bad.jsonl"]


def test_no_zero_is_negative(tmp_path: Path) -> None:
    path = write_lines(tmp_path / "w.jsonl", OPEN, {**GOOD, "at_s": -0.0})
    with open_workload(path, needs_end=False) as opened:
        made = build_workload(opened.header, opened.entries)
    path = write_lines(tmp_path / "v.jsonl", OPEN, {**GOOD, "at_s": 0})
    with open_workload(path, needs_end=False) as opened:
        assert build_workload(opened.header, opened.entries).content_hash == made.content_hash


def draw_entry(draw: random.Random, at_s: float) -> WorkloadEntry:
    blocks = tuple(draw.choice("abcé") for _ in range(draw.randrange(3)))
    recipe = Recipe(
        num_tokens=draw.randrange(40, 60),
        block_tokens=draw.choice([8.0, 20 / 3]) if blocks else 0.0,
        blocks=blocks,
    )
    prompts: list[Prompt] = [recipe, (1, draw.randrange(9)), draw.choice(["x", 'y"\\\n'])]
    wanted = draw.choice([None, 1, 2])
    sampling = draw.choice([{}, {"temperature": 0.0}, {"temperature": 1.0, "seed": 2}])
    return WorkloadEntry(
        index=0,
        at_s=at_s,
        prompt=draw.choice(prompts),
        prompt_class=draw.choice(["", "a", "\u2028"]),
        wanted_tokens=wanted,
        deadline_s=draw.choice([None, 0.1, 1e-6]),
        priority=draw.choice([0, -3]),
        sampling=sampling if wanted else draw.choice([sampling, {"max_tokens": 4}]),
        group=draw.choice(["", "g"]),
    )


def test_any_workload_comes_back_and_no_two_have_one_hash(tmp_path: Path) -> None:
    draw = random.Random(11)
    by_hash: dict[str, Workload] = {}
    for number in range(300):
        times = sorted(draw.choice([0.0, 0.5, 1e-6, 12345.678901]) for _ in range(1 + number % 3))
        header = Header(name="w", prompts="fixed", seed=draw.randrange(2))
        made = build_workload(header, [draw_entry(draw, at_s) for at_s in times])
        save_workload(made, tmp_path / "w.jsonl", replace=True)
        assert load_workload(tmp_path / "w.jsonl") == made
        assert by_hash.setdefault(made.content_hash, made) == made
    assert len(by_hash) > 250


def test_no_changed_byte_goes_unseen(tmp_path: Path) -> None:
    path = tmp_path / "w.jsonl"
    save_workload(MIXED, path)
    content = path.read_bytes()
    first = content.index(b"\n") + 1
    draw, num_refused = random.Random(12), 0
    for _ in range(400):
        place = draw.randrange(first, len(content))
        path.write_bytes(content[:place] + bytes([draw.randrange(256)]) + content[place + 1 :])
        try:
            assert load_workload(path).entries == MIXED.entries
        except WorkloadError:
            num_refused += 1
    assert num_refused > 390


def test_a_pipe_is_refused(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    writer = os.open(tmp_path / "pipe", os.O_RDWR)  # so that opening it for reading does not wait
    message = problem_of(tmp_path / "pipe")
    os.close(writer)
    assert "cannot be read: " in message
    assert "None" not in message


def test_another_kind_of_file_is_not_taken_for_a_workload_that_was_cut(tmp_path: Path) -> None:
    path = tmp_path / "result.json"
    path.write_text('{"schema_version": 1, "goodput": {}}\n')
    with pytest.raises(WorkloadError) as caught:
        load_workload(path)
    assert "line 1" in str(caught.value)
    assert "cut" not in str(caught.value)
