"""The keyword arguments of KmqClient and KafkaStorage are checked before anything connects."""

import pytest

from kmqpy.errors import ConfigError
from kmqpy.kafka.client.client_options import split_options
from kmqpy.kafka.kmq_client import KmqClient
from kmqpy.kafka.settings import KafkaConnection
from kmqpy.kafka.storage import KafkaStorage

NOWHERE = KafkaConnection(bootstrap="127.0.0.1:1")


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"max_in_fligth": 5}, "max_in_fligth: unknown setting; did you mean max_in_flight"),
        ({"prefetch_count": 5}, "did you mean max_in_flight"),
        ({"lease_ms": 5}, "lease_ms: unknown setting"),
        ({"holder": 5}, "holder: 5 is not text"),
        ({"instance_id": 5}, "instance_id: 5"),
        ({"instance_id": ""}, "instance_id: ''"),
        ({"instance_id": "a b"}, "instance_id: 'a b'"),
        ({"delivery_timeout": 10**10}, "delivery_timeout: 10000000000000 ms are more than"),
        ({"max_message_bytes": 2**62}, "max_message_bytes: 4611686018427387904 bytes are more than"),
    ],
)
@pytest.mark.parametrize("made", [KmqClient, KafkaStorage])
def test_wrong_options_are_refused(made, options, text):
    with pytest.raises(ConfigError, match=text):
        made(*(["q"] if made is KmqClient else []), NOWHERE, **options)


def test_the_largest_values_that_librdkafka_takes_are_accepted():
    _, limits = split_options({"delivery_timeout": 2_147_483.647, "max_message_bytes": 999_934_464})
    assert (limits.timeout_ms, limits.max_message_bytes) == (2**31 - 1, 999_934_464)
