"""What is read of /proc."""

import os

import pytest

from bench.peer import usage

pytestmark = pytest.mark.skipif(not usage.PROC.exists(), reason="needs Linux")
STAT = "42 (a ) 7 b) S 1 {group} 3 0 -1 4194304 1 2 3 4 150 50 9 9 20 0 1 0 5 6"


def test_a_command_with_brackets_does_not_shift_the_fields() -> None:
    group, seconds = usage.parse_process(STAT.format(group=77))
    assert group == 77
    assert seconds == pytest.approx(200 * usage.TICK_S)


def test_a_stolen_core_is_busy_and_a_waiting_one_is_not() -> None:
    #            user nice system idle iowait irq softirq steal guest guest_nice
    text = "cpu  10 20 30 1000 500 1 2 40 7 8\ncpu0 9 9 9\n"
    assert usage.parse_busy_s(text) == pytest.approx(usage.TICK_S * (10 + 20 + 30 + 1 + 2 + 40))


def test_a_peak_is_in_bytes_and_a_dead_process_has_none() -> None:
    assert usage.parse_peak_bytes("Name:\tx\nVmPeak:\t9 kB\nVmHWM:\t  3 kB\n") == 3072
    assert usage.parse_peak_bytes("Name:\tx\nState:\tZ (zombie)\n") == 0


def test_a_group_has_what_its_own_processes_use() -> None:
    assert usage.peak_bytes(os.getpgrp()) > 2**20
    assert usage.peak_bytes(2**22 + 1) == 0  # beyond any id
