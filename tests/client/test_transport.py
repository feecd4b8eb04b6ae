"""How a client connects, before anything is sent."""

import pytest

from jaxserve.client import Client, Tls
from jaxserve.client.transport import call_metadata, channel_options


def test_a_key_goes_as_a_bearer_and_none_goes_as_nothing() -> None:
    assert call_metadata("k-1") == (("authorization", "Bearer k-1"),)
    assert call_metadata("") == ()


@pytest.mark.parametrize("key", ["sécret", "secret\n", " secret", "sec\tret"])
def test_a_key_that_no_header_can_carry_is_refused_and_not_repeated(key: str) -> None:
    with pytest.raises(ValueError, match="printable ASCII") as caught:
        Client("127.0.0.1:1", key=key)
    assert key.strip() not in str(caught.value)


def test_a_certificate_and_its_key_go_together() -> None:
    for half in ({"certificate": b"c"}, {"private_key": b"k"}):
        with pytest.raises(ValueError, match="give both or neither"):
            Tls(**half)  # type: ignore[arg-type]


def test_a_private_key_is_not_shown() -> None:
    assert "PRIVATE" not in repr(Tls(certificate=b"c", private_key=b"PRIVATE"))


def test_a_servers_name_and_the_limits_are_the_channels_options() -> None:
    bare = dict(channel_options(900, Tls()))
    named = dict(channel_options(900, Tls(server_name="localhost")))
    assert named.pop("grpc.ssl_target_name_override") == "localhost"
    assert bare == named
    assert bare["grpc.max_receive_message_length"] == bare["grpc.max_send_message_length"] == 900
