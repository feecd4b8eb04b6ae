"""The client for threads."""

import time
from collections.abc import Generator, Sequence
from types import TracebackType
from typing import Self, Unpack

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from jaxserve.client import reading, requests, results, transport
from jaxserve.client.errors import (
    CallDeadlineError,
    UnavailableError,
    build_not_ready,
    read_error,
    server_errors,
)
from jaxserve.client.requests import GenerateOptions, Prompt, ScoreItem
from jaxserve.client.transport import MAX_MESSAGE_BYTES, Tls
from jaxserve.gen import generation_pb2, generation_pb2_grpc, model_pb2, model_pb2_grpc
from jaxserve.request import ChatPrompt

SERVING = health_pb2.HealthCheckResponse.SERVING


class Client:
    """One channel to one server, for any number of threads.

        with Client("127.0.0.1:50051") as client:
            result = client.generate("The capital of France is", max_tokens=8, temperature=0.0)
            print(result.text, result.usage.completion_tokens)

    Methods, errors and `timeout_s` are as in `AsyncClient`.
    """

    def __init__(
        self,
        target: str,
        *,
        tls: Tls | None = None,
        key: str = "",
        max_message_bytes: int = MAX_MESSAGE_BYTES,
    ) -> None:
        """Args:
        target: "host:port", or "unix:/path".
        tls: None is plaintext, where a key can be read on the way.
        key: for a server that asks for one; empty for none.
        max_message_bytes: largest message sent or received.
        """
        options = transport.channel_options(max_message_bytes, tls)
        self._metadata = transport.call_metadata(key)
        self._channel = (
            grpc.insecure_channel(target, options=options)
            if tls is None
            else grpc.secure_channel(target, transport.channel_credentials(tls), options=options)
        )
        self._generation = generation_pb2_grpc.GenerationServiceStub(self._channel)
        self._model = model_pb2_grpc.ModelServiceStub(self._channel)
        self._health = health_pb2_grpc.HealthStub(self._channel)

    def generate(
        self, prompt: Prompt, *, timeout_s: float | None = None, **options: Unpack[GenerateOptions]
    ) -> results.Generation:
        """Returns the whole output.

        Args:
          prompt: text, token ids, or a conversation.
        """
        request = requests.build_generate(prompt, options)
        with server_errors():
            return reading.read_generation(
                self._generation.Generate(request, timeout=timeout_s, metadata=self._metadata)
            )

    def stream(
        self, prompt: Prompt, *, timeout_s: float | None = None, **options: Unpack[GenerateOptions]
    ) -> Generator[results.Event]:
        """Yields one `Start`, any number of `Delta`, one `Finish`.

        Leaving the loop early cancels the request when the generator is closed: at once under
        `contextlib.closing`, else when it is collected.
        """
        request = requests.build_generate(prompt, options)
        reader = reading.EventReader()
        call = self._generation.StreamGenerate(request, timeout=timeout_s, metadata=self._metadata)
        try:
            with server_errors():
                for message in call:
                    yield from reader.read(message)
        finally:
            call.cancel()

    def score(
        self,
        items: Sequence[ScoreItem],
        *,
        request_id: str = "",
        model: str = "",
        priority: int = 0,
        include_token_logprobs: bool = False,
        timeout_s: float | None = None,
    ) -> results.Scores:
        """Returns how likely each item's continuation is after its context."""
        request = requests.build_score(
            items,
            request_id=request_id,
            model=model,
            priority=priority,
            include_token_logprobs=include_token_logprobs,
        )
        with server_errors():
            response: generation_pb2.ScoreResponse = self._generation.Score(
                request, timeout=timeout_s, metadata=self._metadata
            )
        return reading.read_scores(response)

    def cancel(self, request_id: str, *, timeout_s: float | None = None) -> bool:
        """Ends a running request, whose output so far stands; returns whether it was there."""
        request = generation_pb2.CancelGenerationRequest(request_id=request_id)
        with server_errors():
            response: generation_pb2.CancelGenerationResponse = self._generation.CancelGeneration(
                request, timeout=timeout_s, metadata=self._metadata
            )
        return response.found

    def tokenize(
        self,
        prompt: str | ChatPrompt,
        *,
        model: str = "",
        add_special_tokens: bool | None = None,
        include_offsets: bool = False,
        timeout_s: float | None = None,
    ) -> results.Tokens:
        """Returns the token ids that generation would see.

        Args:
          add_special_tokens: None and True are as for a prompt; not for a conversation.
        """
        request = requests.build_tokenize(
            prompt,
            model=model,
            add_special_tokens=add_special_tokens,
            include_offsets=include_offsets,
        )
        with server_errors():
            return reading.read_tokens(
                self._generation.Tokenize(request, timeout=timeout_s, metadata=self._metadata)
            )

    def detokenize(
        self,
        token_ids: Sequence[int],
        *,
        model: str = "",
        skip_special_tokens: bool = True,
        timeout_s: float | None = None,
    ) -> str:
        """Returns the text of token ids."""
        request = generation_pb2.DetokenizeRequest(
            model=model, token_ids=token_ids, skip_special_tokens=skip_special_tokens
        )
        with server_errors():
            response: generation_pb2.DetokenizeResponse = self._generation.Detokenize(
                request, timeout=timeout_s, metadata=self._metadata
            )
        return response.text

    def models(self, *, timeout_s: float | None = None) -> list[results.Model]:
        """Returns the served models."""
        with server_errors():
            response: model_pb2.ListModelsResponse = self._model.ListModels(
                model_pb2.ListModelsRequest(), timeout=timeout_s, metadata=self._metadata
            )
        return reading.read_models(response.models)

    def health(self, *, timeout_s: float | None = None) -> results.Health:
        """Returns whether the server is alive and takes requests; raises where nobody answers."""
        return results.Health(
            is_alive=self._is_serving("", timeout_s),
            is_ready=self._is_serving(requests.GENERATION, timeout_s),
        )

    def wait_ready(self, *, timeout_s: float) -> None:
        """Returns when the server takes requests, though it be not even there yet.

        Raises:
          CallDeadlineError: it took longer than this.
        """
        end_s = time.monotonic() + timeout_s
        request = health_pb2.HealthCheckRequest(service=requests.GENERATION)
        while True:
            call = self._health.Watch(
                request,
                timeout=max(end_s - time.monotonic(), 0.0),
                wait_for_ready=True,
                metadata=self._metadata,
            )
            try:
                for message in call:
                    if message.status == SERVING:
                        return
            except grpc.RpcError as error:
                read = read_error(error)
                if isinstance(read, CallDeadlineError):
                    raise build_not_ready(timeout_s) from error
                if not isinstance(read, UnavailableError):  # it went away: wait for the next
                    raise read from error
            finally:
                call.cancel()

    def close(self) -> None:
        """Closes the channel; calls that still run are cancelled."""
        self._channel.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    def _is_serving(self, service: str, timeout_s: float | None) -> bool:
        request = health_pb2.HealthCheckRequest(service=service)
        with server_errors():
            response: health_pb2.HealthCheckResponse = self._health.Check(
                request, timeout=timeout_s, metadata=self._metadata
            )
        return bool(response.status == SERVING)
