"""One request through every hop, in the order of the README's ten lines."""

import threading

from jaxserve.engine import Delta, Finished, Started
from jaxserve.plan import StepPlan
from jaxserve.request import FinishReason
from tests.engines import ask, build_engine, check_accounts, check_idle
from tests.fakes import EOS_ID, say


def test_one_request_from_submit_to_its_last_event() -> None:
    prompt = tuple(b"Say hi.\n")  # 8 tokens: two pages, a chunk of 6 and one of 2
    answer = [*"hé!".encode(), EOS_ID]
    launched: list[StepPlan] = []
    retired: list[int] = []
    engine_threads = set()

    def on_launch(plan: StepPlan) -> None:
        launched.append(plan)
        engine_threads.add(threading.current_thread().name)

    engine, runner = build_engine(
        script=say({prompt: answer}),
        on_launch=on_launch,
        on_result=lambda plan: retired.append(plan.step_id),
    )
    states = [engine.state]
    engine.add_listener(states.append)
    runner.gate.clear()  # results stay on the "device" until we let go
    engine.start()

    # submit: text → token ids, checked and resolved, in the caller's thread
    stream = engine.submit(ask("Say hi.\n", id="r1", max_tokens=9))
    assert stream.prompt_tokens == len(prompt)

    # engine thread: inbox → scheduler → plan → runner.launch; the stream starts
    events = iter(stream)
    assert next(events) == Started(request_id="r1", prompt_tokens=8)
    runner.gate.set()

    # retire → scheduler.commit → stream.put; the reader's thread turns ids into text
    text, finished = "", None
    token_ids: list[int] = []
    for event in events:
        match event:
            case Delta():
                text += event.text
                token_ids += event.token_ids
            case Finished():
                finished = event
    assert (text, token_ids) == ("hé!", answer)  # the end token is charged, not shown
    assert finished is not None
    assert finished.reason is FinishReason.EOS
    assert (finished.usage.prompt_tokens, finished.usage.completion_tokens) == (8, 5)
    assert (finished.execution.prefill_chunks, finished.execution.preemptions) == (2, 0)
    engine.stop()

    # what was planned: the prompt in two chunks, then a token a step, each fed by the device
    first, second, third = (plan.chunks[0] for plan in launched[:3])
    assert (first.start, first.num_tokens, first.samples) == (0, 6, False)
    assert (second.start, second.token_ids, second.samples) == (6, prompt[6:], True)
    assert (third.start, third.num_tokens, third.token_ids) == (8, 1, None)
    assert engine_threads == {"jaxserve-engine"}
    # every step launched was retired, in order; one ran too long and was thrown away
    assert retired == [plan.step_id for plan in launched] == list(range(1, 8))
    assert engine.metrics.value("surplus_tokens_total") == 1
    assert engine.metrics.value("overlapped_steps_total") == 6

    # the end: everything given back, everything counted
    check_idle(engine)
    check_accounts(engine)
    assert engine.metrics.value("requests_finished_total", reason="eos") == 1
    assert engine.metrics.value("output_tokens_total") == 5
    assert [state.value for state in states] == ["starting", "serving", "draining", "stopped"]
