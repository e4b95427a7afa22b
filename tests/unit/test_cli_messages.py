"""`kmq send` and `kmq receive` without servers."""

import errno

import pytest
from kafka_messages import message

from kmqpy.cli.app import run
from kmqpy.errors import MessageError, Unfinished

pytestmark = pytest.mark.usefixtures("own_environment")


class TestSend:
    class Producer:
        """Sends what is not large; one that is, the broker refuses together with nothing or with others."""

        def __init__(self, error):
            self.error, self.sent = error, []

        def __call__(self, *_):
            return self

        def __enter__(self):
            return self

        def __exit__(self, *_):
            pass

        def send_many(self, bodies, **_):
            small = [body for body in bodies if body != b"large"]
            if len(small) == len(bodies):
                self.sent += small
            elif small and self.error is Unfinished:
                self.sent += small
                raise Unfinished("too large; 2 of these 3 messages were sent", 2)
            else:
                raise MessageError("too large")
            return [f"0-{at}" for at in range(len(bodies))]

    @pytest.mark.parametrize("error", [MessageError, Unfinished])
    @pytest.mark.parametrize("before", [[], [b"0"]])
    def test_nothing_is_sent_twice_when_one_is_too_large(self, before, error, monkeypatch, capsys):
        producer = self.Producer(error)
        monkeypatch.setattr("kmqpy.cli.messages.KmqClient", producer)
        batches = [*([before] if before else []), [b"a", b"large", b"b"]]
        monkeypatch.setattr("kmqpy.cli.messages._lines", lambda: iter(batches))
        assert run(["send", "q", "--zookeeper", ""]) == 1
        assert producer.sent == [*before, b"a", b"b"]
        assert "too large" in capsys.readouterr().err


class TestReceive:
    class Clock:
        def __init__(self):
            self.now = 0.0

        def monotonic(self):
            return self.now

    class LateClient:
        """Is assigned partitions after a while; the message comes a second later."""

        def __init__(self, clock, joined_at):
            self.clock, self.joined_at = clock, joined_at

        def __call__(self, *_, **__):
            return self

        def __enter__(self):
            return self

        def __exit__(self, *_):
            pass

        @property
        def partitions(self):
            return [0] if self.clock.now >= self.joined_at else []

        def receive(self, _max, *, wait, lease):
            if self.clock.now >= self.joined_at + 1:
                return [message()]
            self.clock.now += wait
            return []

        def flush(self):
            pass

    @pytest.mark.parametrize(
        ("joined_at", "wait", "comes"),
        [(0, "2s", True), (9, "2s", True), (9, "500ms", False), (99, "2s", False)],
    )
    def test_the_time_to_join_the_group_does_not_count(self, joined_at, wait, comes, monkeypatch, capsys):
        clock = self.Clock()
        monkeypatch.setattr("kmqpy.cli.messages.SYSTEM_CLOCK", clock)
        monkeypatch.setattr("kmqpy.cli.messages.KmqClient", self.LateClient(clock, joined_at))
        assert run(["receive", "q", "--wait", wait, "--zookeeper", ""]) == 0
        shown = capsys.readouterr()
        assert bool(shown.out) == comes
        assert ("no message within" in shown.err) != comes
        assert clock.now < 20

    def test_follow_waits_for_as_long_as_it_takes(self, monkeypatch, capsys):
        clock = self.Clock()
        monkeypatch.setattr("kmqpy.cli.messages.SYSTEM_CLOCK", clock)
        monkeypatch.setattr("kmqpy.cli.messages.KmqClient", self.LateClient(clock, 60))
        assert run(["receive", "q", "--follow", "--max", "1", "--wait", "1s", "--zookeeper", ""]) == 0
        assert capsys.readouterr().out.count("\n") == 1

    class Client(LateClient):
        """Has three messages, and notes what it is told of them."""

        def __init__(self):
            self.left = [message(offset) for offset in (1, 2, 3)]
            self.told = []

        @property
        def partitions(self):
            return [0]

        def receive(self, most, **_):
            taken, self.left = self.left[:most], self.left[most:]
            return taken

        def ack(self, *messages):
            self.told += [("ack", one.offset) for one in messages]

        def nack(self, *messages, count=True, **_):
            self.told += [("nack", one.offset, count) for one in messages]

    @pytest.mark.parametrize("ack", [[], ["--ack"]])
    @pytest.mark.parametrize("printed", [0, 1, 3])
    def test_what_could_not_be_printed_is_given_back_and_was_no_attempt(self, ack, printed, monkeypatch):
        client, shown = self.Client(), []

        def print_json(one):
            if len(shown) == printed < 3:
                raise OSError(errno.ENOSPC, "No space left on device")
            shown.append(one["offset"])

        monkeypatch.setattr("kmqpy.cli.messages.KmqClient", lambda *_, **__: client)
        monkeypatch.setattr("kmqpy.cli.messages.print_json", print_json)
        code = run(["receive", "q", "--max", "3", *ack, "--zookeeper", ""])
        assert code == (0 if printed == 3 else 2)
        assert shown == [1, 2, 3][:printed]
        given_back = [one for one in client.told if one[0] == "nack"]
        assert given_back == [("nack", offset, False) for offset in [1, 2, 3][printed:]]
        acknowledged = [one for one in client.told if one[0] == "ack"]
        assert acknowledged == ([("ack", offset) for offset in shown] if ack else [])
