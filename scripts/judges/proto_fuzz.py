"""Sends random messages to every method of a server: each ends well, or is refused with a reason.

    python -m scripts.judges.proto_fuzz [MODEL] [--count 10000] [--seed 1]

Starts a server of its own; without MODEL one of a tiny random model. Exit code 1: a call ended with
INTERNAL, UNKNOWN or UNAVAILABLE, or without a reason, or hung; or something of it is left.
"""

import argparse
import collections
import contextlib
import dataclasses
import random
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final, Self

import grpc
import hypothesis
from google.protobuf import message_factory
from google.protobuf.descriptor import ServiceDescriptor
from google.protobuf.message import Message
from grpc_health.v1 import health_pb2
from grpc_reflection.v1alpha import reflection_pb2
from hypothesis import strategies

from jaxserve.client.errors import read_error
from jaxserve.gen import admin_pb2, admin_pb2_grpc, generation_pb2, model_pb2
from scripts.judges.checks import Checks
from scripts.judges.fuzz_messages import build_message, damage
from scripts.judges.idle import check_idle
from scripts.judges.load.server import END_S, Served, serving
from scripts.judges.tiny_model import write_tiny_model

TIMEOUT_S: Final = 60.0
BAD: Final = {grpc.StatusCode.INTERNAL, grpc.StatusCode.UNKNOWN, grpc.StatusCode.UNAVAILABLE}
OURS: Final = "/jaxserve."
ENDLESS: Final = {"/jaxserve.v1.AdminService/WatchLoad", "/grpc.health.v1.Health/Watch"}
GROWTH, SLACK_BYTES = 1.05, 20 << 20


class FaultError(Exception):
    """A message did what none may."""


@dataclasses.dataclass(slots=True, frozen=True, kw_only=True)
class Method:
    """A method of a service, with the messages that it takes and gives."""

    path: str
    asked: type[Message]
    answer: type[Message]
    is_streaming: bool
    takes_stream: bool

    @property
    def name(self) -> str:
        return self.path.rpartition(".")[2]

    @property
    def is_admins(self) -> bool:
        return self.path.startswith("/jaxserve.v1.AdminService/")


def methods_of(*services: ServiceDescriptor) -> list[Method]:
    return [
        Method(
            path=f"/{service.full_name}/{method.name}",
            asked=message_factory.GetMessageClass(method.input_type),
            answer=message_factory.GetMessageClass(method.output_type),
            is_streaming=method.server_streaming,
            takes_stream=method.client_streaming,
        )
        for service in services
        for method in service.methods
    ]


def service_of(file: Any, name: str) -> ServiceDescriptor:  # noqa: ANN401  # a generated module
    found: ServiceDescriptor = file.DESCRIPTOR.services_by_name[name]
    return found


PUBLIC: Final = methods_of(
    service_of(generation_pb2, "GenerationService"),
    service_of(model_pb2, "ModelService"),
    service_of(health_pb2, "Health"),
)
REFLECTION: Final = methods_of(service_of(reflection_pb2, "ServerReflection"))
ADMIN: Final = methods_of(service_of(admin_pb2, "AdminService"))


def vllm_methods() -> list[Method]:
    from smg_grpc_proto import vllm_engine_pb2

    return methods_of(service_of(vllm_engine_pb2, "VllmEngine"))


class Caller:
    """Calls methods with whatever bytes, several at once."""

    def __init__(self, target: str, *, admin: str = "", key: str = "") -> None:
        """Args:
        admin: where AdminService listens.
        """
        options = [("grpc.max_receive_message_length", -1)]
        self._public = grpc.insecure_channel(target, options=options)
        self._admin = grpc.insecure_channel(admin, options=options) if admin else None
        self._metadata = (("authorization", f"Bearer {key}"),) if key else ()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._public.close()
        if self._admin is not None:
            self._admin.close()

    def start(self, method: Method, data: bytes) -> Any:  # noqa: ANN401  # grpc's own
        channel = self._admin if method.is_admins else self._public
        assert channel is not None, "there is no AdminService to be called"
        how: dict[str, Any] = {"timeout": TIMEOUT_S, "metadata": self._metadata}
        read: Any = method.answer.FromString
        if method.takes_stream:
            return channel.stream_stream(method.path, None, read)(iter([data]), **how)
        if method.is_streaming:
            return channel.unary_stream(method.path, None, read)(data, **how)
        return channel.unary_unary(method.path, None, read).future(data, **how)

    def finish(self, method: Method, call: Any) -> str:  # noqa: ANN401
        """Returns the code that a call ended with.

        Raises:
          FaultError: no message may end so.
        """
        try:
            if not method.is_streaming:
                call.result()
            for _ in call if method.is_streaming else ():
                if method.path in ENDLESS:
                    call.cancel()
                    return "OK"
        except grpc.RpcError as error:
            return _check_error(method, error)
        return "OK"


def _check_error(method: Method, error: grpc.RpcError) -> str:
    told = read_error(error)
    is_ours = method.path.startswith(OURS)
    is_late = told.code is grpc.StatusCode.DEADLINE_EXCEEDED and told.reason != "DEADLINE"
    if told.code in BAD or is_late or (is_ours and not told.reason):
        raise FaultError(f"{method.path}: {told.code.name} {told.reason} {told}")
    return told.code.name


def fuzz(
    caller: Caller,
    methods: Sequence[Method],
    *,
    count: int,
    seed: int,
    phases: Sequence[hypothesis.Phase] = (hypothesis.Phase.generate,),
) -> collections.Counter[str]:
    """Sends about that many messages, one to each method at once; returns how many ended how.

    Raises:
      FaultError: a message did what none may; it is in the text.
    """
    ends: collections.Counter[str] = collections.Counter()

    def send(rng: random.Random) -> None:
        asked: list[tuple[Method, bytes]] = []
        for method in methods:
            message = build_message(method.asked, rng)
            data = message.SerializeToString()
            is_damaged = rng.randrange(10) == 0 and not isinstance(message, admin_pb2.DrainRequest)
            asked.append((method, damage(data, rng) if is_damaged else data))
        calls = [caller.start(method, data) for method, data in asked]
        for (method, data), call in zip(asked, calls, strict=True):
            try:
                ends[f"{method.name} {caller.finish(method, call)}"] += 1
            except FaultError as fault:
                shown = _show(method, data)
                raise FaultError(f"{fault}\n{data.hex()}\n{shown}") from None

    run = hypothesis.settings(
        max_examples=-(-count // len(methods)),
        deadline=None,
        database=None,
        suppress_health_check=list(hypothesis.HealthCheck),
        phases=phases,
    )(hypothesis.seed(seed)(hypothesis.given(strategies.randoms(use_true_random=False))(send)))
    run()
    return ends


def _show(method: Method, data: bytes) -> str:
    with contextlib.suppress(Exception):  # it may be no message
        return str(method.asked.FromString(data))
    return "(no message)"


def _fuzz_all(
    served: Served, caller: Caller, methods: Sequence[Method], options: argparse.Namespace
) -> collections.Counter[str]:
    """Sends all messages; where one is a fault, shows the end of the server's log too."""
    phases = (hypothesis.Phase.generate, hypothesis.Phase.shrink)
    try:
        return fuzz(caller, methods, count=options.count, seed=options.seed, phases=phases)
    except FaultError:
        print("\n".join(served.log.read_text().splitlines()[-40:]))
        raise


@contextlib.contextmanager
def _serving(model: str, folder: Path) -> Iterator[tuple[Served, Caller]]:
    admin = f"unix:{folder / 'admin.sock'}"
    words = [model, "--vllm-engine", "--set", f"admin.address={admin}"]
    with (
        serving(words, streams=400) as served,
        Caller(served.target, admin=admin, key=served.keys["alpha"]) as caller,
    ):
        yield served, caller


def run(options: argparse.Namespace, model: str, folder: Path) -> int:
    checks = Checks("proto_fuzz")
    methods = [*PUBLIC, *REFLECTION, *ADMIN, *vllm_methods()]
    # what makes tokens has the most fields
    methods += 4 * [method for method in methods if method.path.endswith(("Generate", "/Score"))]
    with _serving(model, folder) as (served, caller):
        fuzz(caller, methods, count=options.count // 5, seed=options.seed + 1)  # warms it up
        before = served.taken()
        ends = _fuzz_all(served, caller, methods, options)
        _show_ends(ends)
        checks.holds("messages sent", ends.total() >= options.count, ends.total())
        unseen = [x.name for x in methods if not any(end.startswith(f"{x.name} ") for end in ends)]
        checks.same("methods never called", unseen, [])
        check_idle(checks, served.wait_idle(TIMEOUT_S))
        after = served.taken()
        good = after.rss_bytes <= before.rss_bytes * GROWTH + SLACK_BYTES
        seen = f"{before.rss_bytes / 2**20:.1f} MiB, then {after.rss_bytes / 2**20:.1f}"
        checks.holds("resident memory", good, seen)
        log = served.log.read_text()
        checks.same("tracebacks in the log", log.count("Traceback"), 0)
        with grpc.insecure_channel(f"unix:{folder / 'admin.sock'}") as channel:
            admin_pb2_grpc.AdminServiceStub(channel).Drain(admin_pb2.DrainRequest(), timeout=END_S)
        checks.same("exit code after a drain", served.wait(), 0)
    return checks.end()


def _show_ends(ends: Mapping[str, int]) -> None:
    for end, number in sorted(ends.items()):
        print(f"{number:6d}  {end}")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", nargs="?", help="default: a tiny random one")
    parser.add_argument("--count", type=int, default=10_000)
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        return run(options, options.model or str(write_tiny_model(folder / "tiny")), folder)


if __name__ == "__main__":
    sys.exit(main())
