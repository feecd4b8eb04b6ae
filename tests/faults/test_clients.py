"""What clients do to a server: each fault ends its own request, and the server goes on."""

import subprocess
import sys
import urllib.request
from collections.abc import Iterator

import pytest

from jaxserve.client import (
    BadRequestError,
    Client,
    Delta,
    Finish,
    FinishReason,
    ServerFaultError,
)
from tests.faults.processes import (
    MAX_MODEL_TOKENS,
    NOT_A_NUMBER,
    ROOT,
    Place,
    ServerProcess,
    serving,
)

LEAVING = """\
import sys
from jaxserve.client import Client
stream = Client(sys.argv[1]).stream(
    "x" * 2000, request_id="gone", max_tokens=6000, ignore_eos=True, temperature=0.0
)
for event in stream:
    print("read", flush=True)
"""


@pytest.fixture(scope="module")
def running(place: Place) -> Iterator[tuple[ServerProcess, Client]]:
    with serving(place, "--metrics-port", "0") as running:
        yield running


def metric(server: ServerProcess, sample: str) -> float:
    """The value of a sample as it is written, labels and all."""
    with urllib.request.urlopen(server.metrics_url) as reply:
        lines = reply.read().decode().splitlines()
    (value,) = (line.split()[-1] for line in lines if line.startswith(f"{sample} "))
    return float(value)


def ask(client: Client, prompt: str = "Hi") -> tuple[int, ...]:
    result = client.generate(
        prompt, max_tokens=12, ignore_eos=True, temperature=0.0, include_token_ids=True
    )
    assert result.finish_reason is FinishReason.MAX_TOKENS
    return tuple(result.token_ids)


def test_a_client_that_is_killed_frees_what_it_held_and_disturbs_nobody(
    running: tuple[ServerProcess, Client],
) -> None:
    server, client = running
    alone = ask(client)
    killed = subprocess.Popen(
        [sys.executable, "-c", LEAVING, server.target], stdout=subprocess.PIPE, cwd=ROOT
    )
    assert killed.stdout is not None
    for _ in range(3):
        assert killed.stdout.readline() == b"read\n"
    assert metric(server, "jaxserve_kv_reserved_bytes") > 0
    mate = client.stream(
        "Hi", max_tokens=600, ignore_eos=True, temperature=0.0, include_token_ids=True
    )
    next(mate)
    killed.kill()
    killed.wait()
    killed.stdout.close()
    events = list(mate)
    tokens = [token for event in events if isinstance(event, Delta) for token in event.token_ids]
    assert isinstance(events[-1], Finish)
    assert tuple(tokens[:12]) == alone
    assert len(tokens) == 600
    while metric(server, "jaxserve_requests_running"):
        pass  # a hang is the test's timeout
    assert metric(server, "jaxserve_kv_reserved_bytes") == 0
    assert metric(server, 'jaxserve_requests_finished_total{reason="cancelled"}') == 1
    assert ask(client) == alone


def test_a_request_beyond_the_context_is_refused_with_both_numbers(
    running: tuple[ServerProcess, Client],
) -> None:
    _, client = running
    for prompt, max_tokens in (("x" * 9000, 1), ("x", MAX_MODEL_TOKENS)):
        with pytest.raises(BadRequestError) as caught:
            client.generate(prompt, max_tokens=max_tokens)
        assert str(MAX_MODEL_TOKENS) in str(caught.value)
    assert len(ask(client)) == 12


def test_logits_that_are_nan_end_that_request_alone(
    running: tuple[ServerProcess, Client],
) -> None:
    server, client = running
    alone = ask(client)
    mate = client.stream(
        "Hi", max_tokens=200, ignore_eos=True, temperature=0.0, include_token_ids=True
    )
    next(mate)
    for prompt in (NOT_A_NUMBER, f"Hi{NOT_A_NUMBER}{'x' * 40}"):
        with pytest.raises(ServerFaultError, match="are not finite") as caught:
            client.generate(prompt, max_tokens=5)
        assert caught.value.code.name == "INTERNAL"
        assert caught.value.reason == "NUMERICS"
    events = list(mate)
    assert isinstance(events[-1], Finish)
    tokens = [token for event in events if isinstance(event, Delta) for token in event.token_ids]
    assert tuple(tokens[:12]) == alone == ask(client)
    assert client.health().is_ready
    assert not [line for line in server.lines if "Traceback" in line]
