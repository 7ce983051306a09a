"""Who may end a ring: never a thread that would take it from under another."""

import threading

from rayps.comm.ring.mesh import RingLock


class Thing:
    """What can be ended once, and says by which thread."""

    def __init__(self):
        self.wanted, self.by = False, []
        self.hold = RingLock(lambda: self.wanted and not self.by, lambda: self.by.append(threading.get_ident()))


def elsewhere(work):
    """What `work` returns, and the thread that it ran in."""
    found = []
    thread = threading.Thread(target=lambda: found.append((work(), threading.get_ident())))
    thread.start()
    thread.join(60)
    return found[0]


def test_nobody_inside_and_whoever_asks_ends_it():
    thing = Thing()
    thing.wanted = True
    ended, who = elsewhere(thing.hold.settle)
    assert ended and thing.by == [who]


def test_nothing_due_ends_nothing():
    thing = Thing()
    assert thing.hold.settle() and thing.by == []
    with thing.hold:
        pass
    assert thing.by == []


def test_who_is_inside_ends_it_when_it_leaves_the_outermost():
    thing = Thing()
    with thing.hold:
        with thing.hold:
            thing.wanted = True
            assert elsewhere(thing.hold.settle)[0] is False
        assert thing.by == []
    assert thing.by == [threading.get_ident()]


def test_who_is_inside_may_end_it_at_once():
    thing = Thing()
    with thing.hold:
        thing.wanted = True
        assert thing.hold.settle() and thing.by == [threading.get_ident()]
    assert len(thing.by) == 1


def test_whoever_asks_in_the_moment_of_leaving_is_heard():
    for _ in range(2000):
        thing, begin = Thing(), threading.Barrier(2)

        def ask(thing=thing, begin=begin):
            begin.wait()
            thing.wanted = True
            thing.hold.settle()

        thread = threading.Thread(target=ask)
        thread.start()
        begin.wait()
        with thing.hold:
            pass
        thread.join(60)
        assert len(thing.by) == 1
