"""The number of servers that keeps nine waits of ten short."""

import math

import pytest

from kvasir_operator.autoscaling.queueing import num_servers_for, wait_p90_seconds


def test_one_server_waits_as_m_m_1_does():
    # P(W > t) = rho exp(-(1 - rho) t / s), so that one of ten waits longer than ln(10 rho) s / (1 - rho).
    assert wait_p90_seconds(1, 0.5, 2.0) == pytest.approx(math.log(5) * 2.0 / 0.5)


def test_nobody_of_nine_in_ten_waits_where_fewer_than_one_in_ten_is_delayed():
    assert wait_p90_seconds(1, 0.1, 2.0) == 0.0
    assert wait_p90_seconds(1, 0.11, 2.0) > 0.0


@pytest.mark.parametrize("load", [2.0, 2.1])
def test_a_queue_that_only_grows_has_no_end(load):
    assert wait_p90_seconds(2, load, 1.0) == math.inf


def test_the_fewest_servers_are_found():
    needed = num_servers_for(4.0, 1.0, 2.0)
    assert needed is not None
    assert wait_p90_seconds(needed, 4.0, 1.0) <= 1.0 < wait_p90_seconds(needed - 0.02, 4.0, 1.0)


def test_many_servers_may_run_hotter_than_few():
    few, many = num_servers_for(1.0, 1.0, 2.0), num_servers_for(16.0, 1.0, 2.0)
    assert few is not None
    assert many is not None
    assert 1.0 / few < 16.0 / many


def test_no_load_needs_no_server():
    assert num_servers_for(0.0, 1.0, 2.0) == 0.0


def test_no_number_helps_where_being_served_takes_too_long():
    assert num_servers_for(1.0, 2.0, 2.0) is None
    assert num_servers_for(1.0, 1.9, 2.0) is not None
