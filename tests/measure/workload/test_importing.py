"""Traces of others: read as they are written, bad lines named, useless requests counted."""

import json
from pathlib import Path
from typing import Any

import pytest

from jaxserve.errors import ConfigError, WorkloadError
from jaxserve.measure.workload import Recipe, WorkloadEntry, load_workload, save_workload
from jaxserve.measure.workload.entry import build_workload
from jaxserve.measure.workload.importing import Filling, Imported, import_trace, import_workload
from jaxserve.measure.workload.lengths import Uniform
from jaxserve.measure.workload.make import ClosedLoop, OpenLoop
from tests.measure.workload.test_file import MIXED

AZURE = """\
TIMESTAMP,ContextTokens,GeneratedTokens\r
2023-11-16 18:17:03.9799600,4808,10\r
2023-11-16 18:17:05.0319601,3180,8\r
2023-11-16 18:17:04.5319600,110,27\r
2023-11-16 18:17:06.0000000,5,0\r
2023-11-16 18:17:07.0000000,0,5
"""
BURSTGPT = """\
Timestamp,Session ID,Elapsed time,Model,Request tokens,Response tokens,Total tokens,Log Type
5,s1,2.5,ChatGPT,472,18,490,Conversation log
45.5,s2,1,GPT-4,1087,0,1087,API log
118,s1,3,GPT-4,1000,20,1020,API log
"""


MOONCAKE = {"timestamp": 0, "input_length": 512, "output_length": 1}


def read(
    tmp_path: Path,
    format: str,
    text: str,
    **filling: Any,  # noqa: ANN401
) -> tuple[Imported, list[WorkloadEntry]]:
    path = tmp_path / "trace.txt"
    path.write_text(text)
    imported = import_trace(path, format, Filling(**filling))
    return imported, list(imported.entries)


def lines(*objects: object) -> str:
    return "".join(f"{json.dumps(found)}\n" for found in objects)


def problem(tmp_path: Path, format: str, text: str) -> str:
    with pytest.raises(WorkloadError) as caught:
        read(tmp_path, format, text)
    return str(caught.value)


def test_an_azure_trace_is_sorted_from_zero_and_what_did_nothing_is_counted(
    tmp_path: Path,
) -> None:
    imported, entries = read(tmp_path, "azure", AZURE)
    assert [(e.index, e.at_s, e.prompt_tokens, e.wanted_tokens) for e in entries] == [
        (0, 0.0, 4808, 10),
        (1, 0.552, 110, 27),
        (2, 1.052, 3180, 8),
    ]
    assert imported.counts == {"no_output": 1, "no_prompt": 1}
    assert imported.header.licence == "", "anybody may write a file of this layout"
    assert imported.header.prompts == "unique"
    assert imported.header.source == "trace.txt, in the layout of Azure/AzurePublicDataset"


def test_azure_times_may_have_a_zone(tmp_path: Path) -> None:
    head = "TIMESTAMP,ContextTokens,GeneratedTokens\n"
    rows = "2024-05-10 00:00:00.009930+00:00,1,1\n2024-05-10 02:00:01.009930+02:00,1,1\n"
    assert [entry.at_s for entry in read(tmp_path, "azure", head + rows)[1]] == [0.0, 1.0]


def test_burstgpt_keeps_kind_and_session_and_counts_failures(tmp_path: Path) -> None:
    imported, entries = read(tmp_path, "burstgpt", BURSTGPT)
    assert [(e.at_s, e.prompt_tokens, e.wanted_tokens) for e in entries] == [
        (0.0, 472, 18),
        (113.0, 1000, 20),
    ]
    assert [(entry.prompt_class, entry.group) for entry in entries] == [
        ("Conversation log", "s1"),
        ("API log", "s1"),
    ]
    assert imported.counts == {"no_output": 1}


def test_burstgpt_without_its_newer_columns_is_read(tmp_path: Path) -> None:
    text = (
        "Timestamp,Model,Request tokens,Response tokens,Total tokens,Log Type\n5,a,4,1,5,API log\n"
    )
    assert read(tmp_path, "burstgpt", text)[1][0].group == ""


def test_mooncake_hashes_become_shared_blocks(tmp_path: Path) -> None:
    first = {"timestamp": 1500, "input_length": 1300, "output_length": 6, "hash_ids": [0, 1, 2]}
    second = {"timestamp": 3000, "input_length": 600, "output_length": 4, "hash_ids": [0, 7]}
    third = {"timestamp": 3000, "input_length": 20, "output_length": 4}
    _, entries = read(tmp_path, "mooncake", lines(first, second, third))
    assert [entry.at_s for entry in entries] == [0.0, 1.5, 1.5]
    assert [entry.prompt for entry in entries] == [
        Recipe(num_tokens=1300, block_tokens=512, blocks=("0", "1", "2")),
        Recipe(num_tokens=600, block_tokens=512, blocks=("0", "7")),
        Recipe(num_tokens=20),
    ]


def test_vllms_prompts_are_texts_that_stay_the_same(tmp_path: Path) -> None:
    text = lines({"prompt": "Hi", "output_tokens": 5}, {"prompt": "Ho", "other": 1})
    filling = {"arrivals": ClosedLoop(concurrency=3), "output": Uniform(low=9, high=9)}
    imported, entries = read(tmp_path, "vllm", text, **filling)
    assert [(e.prompt, e.wanted_tokens, e.at_s) for e in entries] == [("Hi", 5, 0), ("Ho", 9, 0)]
    header = imported.header
    assert (header.prompts, header.arrivals, header.concurrency) == ("fixed", "closed", 3)


def talk(*turns: tuple[str, str]) -> dict[str, object]:
    return {"id": "x", "conversations": [{"from": who, "value": said} for who, said in turns]}


CHATS = json.dumps(
    [
        talk(("human", "one two"), ("gpt", "three four five"), ("human", "more")),
        talk(("human", "alone")),
        talk(("gpt", "late"), ("human", "early")),
        talk(("user", "six"), ("gpt", "")),
        talk(("user", "six"), ("gpt", "seven")),
    ]
)


def count_words(text: str) -> int:
    return len(text.split())


def test_sharegpt_gives_the_first_message_and_the_length_of_its_reply(tmp_path: Path) -> None:
    filling = {"arrivals": OpenLoop(rate=2.0), "count_tokens": count_words}
    imported, entries = read(tmp_path, "sharegpt", CHATS, **filling)
    assert [(e.prompt, e.wanted_tokens) for e in entries] == [("one two", 3), ("six", 1)]
    assert imported.counts == {"no_reply": 3}
    assert imported.header.prompts == "fixed"
    assert 0 < entries[0].at_s < entries[1].at_s


def test_lengths_may_be_kept_without_the_texts(tmp_path: Path) -> None:
    filling = {"arrivals": OpenLoop(rate=2.0), "count_tokens": count_words, "drops_text": True}
    imported, entries = read(tmp_path, "sharegpt", CHATS, **filling)
    assert [entry.prompt_tokens for entry in entries] == [2, 1]
    assert imported.header.prompts == "unique"
    assert "one two" not in repr(entries)


@pytest.mark.parametrize(
    ("format", "text", "filling", "message"),
    [
        ("azure", AZURE, {"arrivals": OpenLoop(rate=1.0)}, "azure has its own arrivals; leave"),
        ("vllm", "", {}, "vllm has no arrivals; give --rate or --concurrency"),
        ("vllm", '{"prompt": "Hi"}', {"arrivals": OpenLoop(rate=1.0)},
         "request 1 has no output length; --output-tokens sets"),
        ("sharegpt", CHATS, {"arrivals": OpenLoop(rate=1.0)},
         "request 1 has its reply as a text; --tokenizer counts it"),
        ("sharegpt", CHATS, {"arrivals": OpenLoop(rate=1.0), "drops_text": True},
         "--lengths-only needs the tokenizer"),
    ],
)  # fmt: skip
def test_what_a_file_does_not_tell_must_be_given(
    format: str, text: str, filling: dict[str, Any], message: str, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match=message):
        read(tmp_path, format, text, **filling)


@pytest.mark.parametrize(
    ("format", "text", "message"),
    [
        ("azure", "TIMESTAMP,ContextTokens\n", "line 1: it has no column GeneratedTokens"),
        ("azure", "", "line 1: it has no column TIMESTAMP"),
        ("azure", AZURE.replace("3180", "31.5"), 'line 3: ContextTokens is "31.5", but must be a'),
        ("azure", AZURE.replace("3180", "-1"), 'line 3: ContextTokens is "-1"'),
        ("azure", AZURE.replace(",3180", ""), "line 3: it has 2 values, but there are 3 columns"),
        ("azure", AZURE.replace("2023-11-16 18:17:05.0319601", "soon"),
         'line 3: TIMESTAMP is "soon", but must be a time as 2023-11-16'),
        ("azure", '"a', "line 1: it is not CSV"),
        ("burstgpt", BURSTGPT.replace("118,", "x,"), "line 4: Timestamp is 'x', but must be"),
        ("burstgpt", BURSTGPT.replace("118,", "nan,"), "line 4: Timestamp is NaN, but must be"),
        ("mooncake", "{}", "line 1: timestamp is missing, but must be a number"),
        ("mooncake", lines({**MOONCAKE, "hash_ids": [1, 2]}),
         "line 1: hash_ids has 2 ids, but input_length 512 is 1 blocks of 512"),
        ("mooncake", lines({**MOONCAKE, "hash_ids": ["a"]}),
         'line 1: an id in hash_ids is "a", but must be a whole number'),
        ("mooncake", lines({**MOONCAKE, "input_length": "5"}), 'line 1: input_length is "5"'),
    ],
    ids=lambda value: str(value)[:30],
)  # fmt: skip
def test_a_bad_line_is_named(format: str, text: str, message: str, tmp_path: Path) -> None:
    assert f"trace.txt, {message}" in problem(tmp_path, format, text)


def test_several_bad_lines_are_counted(tmp_path: Path) -> None:
    text = AZURE.replace("4808", "a").replace("3180", "b").replace("110", "c")
    assert problem(tmp_path, "azure", text).endswith("(and 2 more: lines 3, 4)")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "is not JSON"),
        ("{}", "is {}, but ShareGPT is a list of conversations"),
        ("[1]", "item 1: it is 1, but must be"),
        ('[{"conversations": [1, 2]}]', "item 1: a turn is 1, but must be"),
        ('[{"conversations": [{"from": "human", "value": 3}, {}]}]', "value is 3, but must be"),
    ],
)  # fmt: skip
def test_a_bad_conversation_is_named(text: str, message: str, tmp_path: Path) -> None:
    path = tmp_path / "chats.json"
    path.write_text(text)
    with pytest.raises(WorkloadError, match=r"chats\.json") as caught:
        import_trace(path, "sharegpt", Filling(arrivals=OpenLoop(rate=1.0)))
    assert message in str(caught.value)


def test_a_trace_of_nothing_and_one_that_is_not_there_are_refused(tmp_path: Path) -> None:
    head = "TIMESTAMP,ContextTokens,GeneratedTokens\n"
    assert "holds no request with a prompt and an output" in problem(tmp_path, "azure", head)
    with pytest.raises(WorkloadError, match="cannot be read: No such file"):
        import_trace(tmp_path / "none", "azure", Filling())


def test_a_workload_without_an_end_is_taken_as_far_as_it_goes(tmp_path: Path) -> None:
    path = tmp_path / "w.jsonl"
    save_workload(MIXED, path)
    content = path.read_bytes()
    path.write_bytes(content[: content.rfind(b'{"at_s":1.0') + 20])  # cut in its last entry
    imported = import_workload(path)
    assert tuple(imported.entries) == MIXED.entries[:3]
    assert imported.counts == {"cut": 1}
    assert imported.header == MIXED.header


def test_a_workload_written_by_hand_is_sorted_and_begins_at_zero(tmp_path: Path) -> None:
    path = tmp_path / "w.jsonl"
    later, sooner = {"at_s": 3, "prompt_tokens": 2}, {"at_s": 1.5, "prompt_tokens": 1}
    path.write_text(lines({"jaxserve_workload": 1}, later, sooner).rstrip("\n"))
    imported = import_workload(path)
    entries = list(imported.entries)
    assert [(e.index, e.at_s, e.prompt_tokens) for e in entries] == [(0, 0.0, 1), (1, 1.5, 2)]
    save_workload(build_workload(imported.header, entries), tmp_path / "whole.jsonl")
    assert load_workload(tmp_path / "whole.jsonl").entries == tuple(entries)


def test_a_bad_line_before_the_cut_is_still_bad(tmp_path: Path) -> None:
    path = tmp_path / "w.jsonl"
    path.write_text(lines({"jaxserve_workload": 1}, {"at_s": -1}) + '{"at_s"')
    with pytest.raises(WorkloadError, match="line 2: "):
        import_workload(path)
