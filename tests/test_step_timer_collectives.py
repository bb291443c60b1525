"""The timer of fit's steps, of collectives that run beside them and of those within."""

from __future__ import annotations

import pytest

from simulated_queue import SimulatedQueue, run_step, skip_first, timed
from torchfast import phase
from torchfast._core.collectives import Collectives
from torchfast._core.phases import CAPTURE, REPLAY
from torchfast.profiling.step_timer import EVERY


class Issuer:
    """What a model on several ranks does: it issues collectives, and notes them for who asks."""

    def __init__(self, queue):
        self.queue = queue
        self.observation = None
        self.heard = []

    def observe(self, observation):
        self.observation = observation
        self.heard.append(observation)

    def start(self, ms):
        """Issue one that runs beside the step."""
        if self.observation is not None:
            return self.observation.start(lambda: ms)[1]
        return None

    def run(self, ms, name=None):
        """Issue one in the current queue, or in another that the step does not stand in."""
        if self.observation is None:
            return self.queue.spend(ms)
        if name is None:
            return self.observation.run(lambda: self.queue.spend(ms))
        own, at_ms = self.queue.name, self.queue.at_ms
        self.queue.name = name
        try:
            return self.observation.run(lambda: self.queue.spend(ms))
        finally:
            self.queue.name, self.queue.at_ms = own, at_ms

    def wait_for(self, *collectives):
        """Have the step wait for some, and go on at once where they are done."""
        until = max(each.end.at for each in collectives)
        self.observation.wait_for(collectives)
        self.queue.at_ms = max(self.queue.at_ms, until)


@pytest.fixture
def queue():
    return SimulatedQueue()


@pytest.fixture
def issuer(queue):
    return Issuer(queue)


@pytest.fixture
def timer(queue, issuer):
    collectives = Collectives()
    collectives.issued_by(issuer.observe)
    with timed(queue, collectives) as timer:
        skip_first(timer, queue)
        yield timer


def p50(timer, queue, name):
    queue.let_pass()
    return timer.times()[name].p50_ms


# --- what is measured -----------------------------------------------------------------------------


def test_what_is_hidden_behind_the_backward_is_told_and_not_exposed(timer, queue, issuer):
    timer.begin_step()
    with phase("backward"):
        queue.spend(2.0)
        gradients = issuer.start(3.0)
        queue.spend(4.0)
        issuer.wait_for(gradients)
    timer.end_step()
    assert p50(timer, queue, "communication") == 3.0
    assert p50(timer, queue, "exposed_communication") == 0.0
    assert p50(timer, queue, "backward") == 6.0
    assert p50(timer, queue, "other") == 0.0
    found = timer.times()
    assert found["communication"].source == "beside the step"
    assert found["exposed_communication"].source == "measured"
    names = [row.name for row in found.phases]
    assert names.index("communication") + 1 == names.index("exposed_communication")


def test_what_the_step_stands_still_for_is_exposed(timer, queue, issuer):
    timer.begin_step()
    with phase("backward"):
        queue.spend(5.0)
        gradients = issuer.start(4.0)
        queue.spend(1.0)
        issuer.wait_for(gradients)
    timer.end_step()
    assert p50(timer, queue, "communication") == 4.0
    assert p50(timer, queue, "exposed_communication") == 3.0
    assert p50(timer, queue, "backward") == 9.0


def test_two_at_a_time_count_once_and_a_pause_between_two_does_not(timer, queue, issuer):
    timer.begin_step()
    with phase("forward"):
        issuer.run(4.0, "gathering")  # 0 to 4
        queue.spend(3.0)
        last = issuer.start(2.0)  # 3 to 5
        queue.spend(5.0)
        later = issuer.start(1.0)  # 8 to 9
        issuer.wait_for(last, later)
    timer.end_step()
    assert p50(timer, queue, "communication") == 6.0
    assert p50(timer, queue, "exposed_communication") == 1.0


def test_one_behind_another_is_counted_from_when_that_is_done(timer, queue, issuer):
    timer.begin_step()
    with phase("backward"):
        first, second = issuer.start(3.0), issuer.start(2.0)
        queue.spend(10.0)
        issuer.wait_for(first, second)
    timer.end_step()
    assert p50(timer, queue, "communication") == 5.0


def test_one_in_the_step_s_own_queue_is_exposed_and_lies_in_its_phase(timer, queue, issuer):
    timer.begin_step()
    with phase("forward"):
        queue.spend(1.0)
        issuer.run(2.0)
    with phase("update"):
        queue.spend(1.0)
        with phase("communication"):
            queue.spend(0.5)
    with phase("communication"):
        queue.spend(0.25)
    timer.end_step()
    assert p50(timer, queue, "communication") == 2.75
    assert p50(timer, queue, "exposed_communication") == 2.75
    assert p50(timer, queue, "forward") == 3.0
    assert p50(timer, queue, "update") == 1.5
    assert p50(timer, queue, "other") == 0.25  # the parts are the step


def test_without_collectives_beside_it_communication_is_a_phase_like_any_other(queue):
    with timed(queue) as timer:
        skip_first(timer, queue)
        run_step(timer, queue, forward=2.0, communication=1.0)
        queue.let_pass()
        found = timer.times()
    assert (found["communication"].p50_ms, found["communication"].source) == (1.0, "measured")
    assert found["other"].p50_ms == 0.0
    assert "exposed_communication" not in found.to_dict()


def test_steps_without_collectives_have_no_such_rows(timer, queue):
    run_step(timer, queue, forward=2.0)
    queue.let_pass()
    assert not timer.times().to_dict().keys() & {"communication", "exposed_communication"}


def test_where_waits_are_not_known_nothing_is_said_of_them(timer, queue, issuer):
    timer.begin_step()
    issuer.observation.knows_waits = False
    issuer.start(3.0)
    queue.spend(4.0)
    timer.end_step()
    assert p50(timer, queue, "communication") == 3.0
    assert "exposed_communication" not in timer.times().to_dict()


def test_an_end_that_was_noted_late_is_that_of_the_wait(timer, queue, issuer):
    timer.begin_step()
    gradients = issuer.start(9.0)
    queue.spend(2.0)
    wait = issuer.observation.wait_for([gradients])
    queue.spend(1.0)
    issuer.observation.go_on(wait)
    queue.spend(8.0)
    timer.end_step()
    assert p50(timer, queue, "communication") == 3.0
    assert p50(timer, queue, "exposed_communication") == 1.0


def test_one_whose_end_cannot_be_told_is_left_out(timer, queue, issuer):
    timer.begin_step()
    assert issuer.observation.start(lambda: "unknown") == ("unknown", None)
    issuer.start(1.0)
    queue.spend(2.0)
    timer.end_step()
    assert p50(timer, queue, "communication") == 1.0


def test_a_name_that_the_table_has_is_told_apart(timer, queue, issuer):
    timer.begin_step()
    issuer.start(1.0)
    with phase("exposed_communication"):
        queue.spend(2.0)
    timer.end_step()
    assert p50(timer, queue, "exposed_communication (yours)") == 2.0
    assert p50(timer, queue, "exposed_communication") == 0.0


# --- when it is noted -----------------------------------------------------------------------------


def test_only_steps_that_are_taken_apart_are_looked_at(timer, queue, issuer):
    for _ in range(7):
        run_step(timer, queue)
    queue.let_pass()
    assert len(issuer.heard) == 14  # the second to the eighth step, and the end of each
    issuer.heard.clear()
    for _ in range(2 * EVERY):
        run_step(timer, queue, forward=1000.0)
        queue.let_pass()
        assert issuer.observation is None
    heard = [each is not None for each in issuer.heard]
    assert heard == [True, False] * (len(heard) // 2)
    assert 1 <= len(heard) // 2 <= 2


def test_a_step_that_comes_to_nothing_is_looked_at_no_more(timer, queue, issuer):
    timer.begin_step()
    assert issuer.observation is not None
    seen = issuer.observation
    timer.cancel_step()
    assert issuer.observation is None
    assert not seen.is_on


def test_nothing_is_noted_in_a_capture(timer, queue, issuer):
    timer.begin_step()
    with phase(CAPTURE):
        queue.is_capturing = True
        assert issuer.start(3.0) is None
        issuer.run(3.0)
        assert issuer.observation.moment() is None
        queue.is_capturing = False
        assert issuer.start(3.0) is None  # nor in what is left of that step
    timer.end_step()
    queue.let_pass()
    assert not timer.times()


def test_replays_are_told_with_the_collectives_of_the_warm_up(timer, queue, issuer):
    timer.begin_step()
    with phase("backward"):
        gradients = issuer.start(3.0)
        queue.spend(1.0)
        issuer.wait_for(gradients)
    timer.end_step()
    timer.begin_step()
    with phase(REPLAY):
        queue.spend(2.0)
    timer.end_step()
    queue.let_pass()
    found = timer.times()
    for name, ms in {"communication": 3.0, "exposed_communication": 2.0}.items():
        assert (found[name].p50_ms, found[name].source) == (ms, "from warm-up")


def test_a_graph_that_tells_of_its_phases_does_not_tell_of_collectives(timer, queue, issuer):
    """It knows of those in the step's own queue only."""
    timer.begin_step()
    issuer.start(3.0)
    timer.end_step()
    timer.begin_step()
    with phase(REPLAY):
        queue.spend(5.0)
    timer.end_step()
    timer.note_replays([{"backward": 2.0, "communication": 0.5}])
    queue.let_pass()
    found = timer.times()
    assert (found["backward"].p50_ms, found["backward"].source) == (2.0, "measured")
    assert found["communication"].p50_ms == 3.0
    assert found["communication"].source == "from warm-up"


def test_nothing_is_read_before_a_collective_is_done(timer, queue, issuer):
    timer.begin_step()
    gradients = issuer.start(50.0)  # which nobody waits for
    queue.spend(1.0)
    timer.end_step()
    queue.let_pass()
    assert not timer.times()
    end, gradients.end = gradients.end, None  # as long as another thread has not said so
    queue.passed_ms = 50.0
    assert not timer.times()
    gradients.end = end
    assert timer.times()["communication"].p50_ms == 50.0


def test_moments_are_used_again(timer, queue, issuer):
    for _ in range(50):
        timer.begin_step()
        gradients = issuer.start(1.0)
        if gradients is not None:
            issuer.wait_for(gradients)
        timer.end_step()
        queue.let_pass()
    assert queue.num_made == 5  # `give_back` fails on one that comes twice
    timer.times()
    assert len(queue.spare) == 5
