"""What a thread is in the middle of."""

import threading

from kmqpy.core.stack import is_inside


class Thing:
    def call(self, then):
        return then()

    def each(self):
        yield self

    def inside(self):
        return is_inside((Thing.call, Thing.each), self)


def test_a_thread_is_inside_the_calls_that_have_not_returned():
    one, another = Thing(), Thing()
    assert one.call(one.inside)
    assert one.call(lambda: another.call(one.inside))
    assert not one.call(another.inside)
    assert not one.inside()


def test_no_thread_is_inside_an_iteration_whose_body_runs():
    assert not [one for one in Thing().each() if one.inside()]


def test_other_threads_are_inside_nothing():
    one, found = Thing(), []
    looking = threading.Thread(target=lambda: found.append(one.inside()))
    one.call(lambda: looking.start() or looking.join())
    assert found == [False]
