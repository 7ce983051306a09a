"""The table of faults: each fault by its number, and the tests that prove what happens. docs/failures.md shows it.

A fault without a test says why. A test that is renamed or removed fails here.
"""

import ast
import re
from functools import cache
from typing import NamedTuple

import pytest
from folders import TESTS, WITHOUT

PAGE = (TESTS.parent / "docs" / "failures.md").read_text(encoding="utf-8")


class Proven(NamedTuple):
    """A fault, and its tests as "file::test" without test_ and .py; `untested` says why there is none."""

    fault: str
    tests: tuple[str, ...] = ()
    untested: str = ""


TABLE = {
    "F1": Proven(
        "a worker is killed at any moment",
        (
            "chaos::a_worker_is_killed_in_all_reduce",
            "chaos::a_worker_and_then_a_shard_are_killed_out_of_step",
            "exactly_once::a_death_at_a_named_place",
            "ps_chaos::a_worker_that_dies_at_a_named_place",
            "replica_deaths_any_moment::a_death_at_any_moment",
            "own_loop::kill_9_of_a_worker_changes_nothing",
            "user_code_ends::a_process_that_user_code_ends_once_is_replaced",
        ),
    ),
    "F2": Proven(
        "a server is killed before, during or after a push, a checkpoint or a pull",
        (
            "exactly_once::a_death_at_a_named_place",
            "ps_chaos::a_server_that_dies_at_a_named_place",
            "ps_replication::a_promotion_keeps_each_acknowledged_push_exactly_once",
            "replica_deaths_servers::in_step_a_dead_server_of_a_group_changes_no_bit",
        ),
    ),
    "F3": Proven(
        "several servers are killed, also during the recovery",
        (
            "exactly_once::several_deaths",
            "exactly_once::shards_that_die_one_after_the_other_in_threads",
            "ps_chaos::servers_that_die_at_random_moments",
            "ps_chaos::servers_that_die_while_segments_move",
            "ps_chaos::without_replicas_what_is_lost_is_said",
            "ps_manager::without_copies_a_dead_servers_segments_are_lost_and_said_to_be",
        ),
    ),
    "F4": Proven(
        "a host is lost with all its processes",
        (
            "bench_fault_costs::a_lost_host_a_cut_line_and_a_slow_one_cost_no_push",
            "service::a_ray_that_loses_a_process_costs_neither_the_service_nor_a_job",
            "replica_deaths_any_moment::the_state_comes_from_another_host",
        ),
    ),
    "F5": Proven(
        "Ray's head (gcs) is killed",
        (
            "service::a_ray_that_loses_a_process_costs_neither_the_service_nor_a_job",
            "ray_process::what_hangs_is_given_up",
            "ray_process::the_service_outlives_a_hurt_ray_and_says_so",
        ),
    ),
    "F6": Proven(
        "the driver is killed",
        (
            "service::a_driver_that_is_killed_is_started_again",
            "service_kills::a_driver_killed_at_its_begin_and_its_end",
            "sharded_state_kills::a_driver_killed_between_the_parts_and_the_manifest_leaves_the_checkpoints_before",
            "scheduler::a_lost_driver_is_started_again_until_it_is_enough",
        ),
    ),
    "F7": Proven(
        "the service is killed at each step of a job's life",
        (
            "service_kills::killed_between_submit_and_end",
            "service_kills::killed_while_it_starts_a_job_again",
            "service_kills::killed_while_it_stops_a_job",
            "service_kills::killed_while_it_kills_a_driver",
            "service::a_service_that_is_killed_and_then_its_database_is_lost_leaves_no_hole",
            "service::a_service_that_is_killed_while_a_driver_starts_leaves_no_job_starting",
            "scheduler::no_status_is_for_ever",
        ),
    ),
    "F8": Proven(
        "a client goes away while it submits",
        ("faults_service::a_client_that_goes_away_while_it_submits_leaves_a_whole_job_or_none",),
    ),
    "F9": Proven(
        "another program has locked the store",
        (
            "faults_service::a_locked_store_is_said_to_be_busy_and_nothing_is_changed",
            "faults_service::what_a_locked_file_looks_like",
        ),
    ),
    "F10": Proven(
        "the store's disk is full, its file is damaged or lost",
        (
            "full_disk::a_store_without_room_refuses_with_507_and_keeps_what_it_acknowledged",
            "full_disk::a_service_on_a_full_disk_serves_or_says_why_not",
            "faults_service::a_store_with_a_damaged_page_is_refused_with_the_way_out_and_not_changed",
            "faults_service::a_commit_is_on_disk_before_it_is_acknowledged",
            "store::a_file_that_is_no_store_is_refused",
            "adoption::no_job_is_lost_with_the_store",
        ),
    ),
    "F11": Proven("the database server restarts", untested="the store is one SQLite file, without a server"),
    "F12": Proven(
        "Ray's object store is full",
        untested="vectors do not pass through Ray's store; blocks of a user's Ray Dataset do, under Ray's own limits",
    ),
    "F13": Proven(
        "hosts cannot reach each other for a while, or for ever",
        (
            "bench_fault_costs::a_lost_host_a_cut_line_and_a_slow_one_cost_no_push",
            "chaos_inject::only_lines_among_the_named_processes_are_cut",
            "ps_session::a_server_that_is_silent_is_left_when_the_map_says_so",
            "ps_replication::a_fenced_primary_answers_nothing_and_changes_nothing",
        ),
    ),
    "F14": Proven(
        "a line is slow",
        (
            "bench_fault_costs::a_lost_host_a_cut_line_and_a_slow_one_cost_no_push",
            "chaos_inject::a_line_is_slowed_for_the_time_of_the_fault",
            "link::a_payload_that_arrives_in_small_parts_wakes_its_reader_rarely",
        ),
    ),
    "F15": Proven(
        "a process is slow, or frozen and continued",
        (
            "chaos::a_worker_is_frozen",
            "ring::a_killed_or_frozen_process_is_named_by_everyone",
            "ps_manager::a_silent_server_is_taken_for_dead_and_may_come_back",
            "clock::whoever_obeys_the_clock_keeps_the_bound",
            "server::a_rank_that_joins_again_fences_the_former_holder",
        ),
    ),
    "F16": Proven(
        "a gradient, a loss or an update is not finite",
        (
            "finite::a_gradient_that_is_not_finite_in_the_last_round_is_no_success",
            "finite::a_step_that_overflows_is_no_success",
            "tables_finite::a_row_that_overflows_is_no_success",
            "finite::a_client_whose_gradient_is_not_finite_is_rejected_by_name",
            "finite::resume_falls_back_to_the_newest_good_checkpoint",
        ),
    ),
    "F17": Proven(
        "clients send wrong updates on purpose",
        (
            "robust::a_rule_bears_four_of_twenty",
            "robust::other_attacks_are_borne",
            "robust::refused_before_anything_starts",
            "attacks::counts_that_attackers_inflate_do_not_move_a_robust_rule",
        ),
    ),
    "F18": Proven(
        "messages are lost, repeated or reordered",
        (
            "ledger::whatever_is_lost_repeated_reordered_or_killed_each_push_counts_once",
            "ledger::each_push_is_new_once_in_any_order",
            "ps_session::an_answer_that_is_lost_is_no_second_push",
            "replay::a_retried_push_pull_counts_once_and_still_pulls",
        ),
    ),
    "F19": Proven(
        "a checkpoint is torn or damaged",
        (
            "checkpoint::a_torn_file_is_refused_and_passed_over",
            "checkpoint::any_flipped_bit_is_seen",
            "checkpoint::a_writer_killed_at_any_point_leaves_no_half",
            "checkpoint::a_damaged_checkpoint_names_the_newest_earlier_one_that_is_valid",
            "checkpoint_parts::a_writer_killed_anywhere_leaves_a_whole_checkpoint_or_none",
        ),
    ),
    "F20": Proven(
        "the disk is full while a job trains",
        (
            "full_disk_training::on_a_disk_that_is_really_full_for_a_while_nothing_is_missing",
            "full_disk_training::lines_wait_for_room_and_are_written_once_and_in_order",
            "full_disk_training::a_checkpoint_without_room_is_an_error_of_its_place_and_leaves_no_draft",
            "checkpoint::a_failed_write_leaves_what_was_there",
        ),
    ),
    "F21": Proven(
        "no descriptor is left",
        (
            "connections::limits_leave_descriptors_for_the_service",
            "connections::of_two_hundred_streams_at_once_no_more_than_the_limit_are_open",
            "link::a_listener_without_descriptors_turns_callers_away_and_rests",
            "ring::two_hundred_groups_leave_no_descriptor_no_thread_and_no_memory",
        ),
    ),
    "F22": Proven(
        "the wall clock jumps",
        (
            "scheduler::a_clock_that_is_set_kills_nobody",
            "ray_daemon::a_clock_that_is_set_ends_nothing",
            "ray_daemon::a_suspend_longer_than_the_lease_ends_nothing",
            "chaos_inject::a_clock_is_shifted_and_set_right",
        ),
    ),
    "F23": Proven(
        "the memory is exhausted",
        (
            "memory_limit::errors_that_say_there_is_no_memory",
            "mistakes::a_model_larger_than_the_memory_is_refused_before_it_is_built",
            "mistakes::memory_of_the_machine_and_of_a_cgroup",
            "trial::what_is_wrong_with_its_process_only_is_no_verdict",
        ),
    ),
    "F24": Proven(
        "two services, or two drivers of one job",
        (
            "faults_service::a_second_service_on_the_same_state_is_refused",
            "cluster::two_actors_of_one_name_are_refused",
            "scheduler::what_is_left_of_an_attempt_is_ended_before_the_next",
            "store::a_lost_race_raises_and_changes_nothing",
        ),
    ),
    "F25": Proven(
        "stop, submit and delete while other faults happen",
        (
            "store::stop_is_a_wish_once_and_refused_at_the_end",
            "store::every_move_is_held_to_the_table",
            "service_kills::killed_while_it_stops_a_job",
            "scheduler::a_stop_of_a_job_that_cannot_be_seen_has_a_deadline",
            "ps_manager::a_resize_during_a_resize",
        ),
    ),
    "F26": Proven(
        "a member of a ring dies in a collective",
        (
            "ring::a_rank_that_dies_in_a_collective_is_named_by_everyone",
            "ring::no_rank_returns_a_sum_that_lacks_the_leaves_below_a_dead_node",
            "ring::what_was_cut_off_in_shared_memory_is_never_used_again",
            "ring::an_abort_reaches_everyone_and_the_next_generation_starts_clean",
        ),
    ),
    "F27": Proven(
        "a new version finds an old state, and an old version a new one",
        (
            "ps_record::a_damaged_or_foreign_record_is_refused_and_left",
            "store::the_store_of_another_version_is_refused_in_a_sentence",
            "checkpoint::foreign_and_newer_and_crafted_manifests",
            "store::a_file_that_is_no_store_is_refused",
            "versions::a_driver_of_another_version_is_never_asked",
        ),
    ),
    "F28": Proven(
        "a process is killed in its first seconds, at each attempt",
        (
            "newborn::a_process_that_dies_at_each_step_of_its_start",
            "newborn::a_job_whose_process_always_dies_ends_after_max_failures",
            "newborn::the_error_after_the_last_attempt_quotes_what_the_process_wrote",
        ),
    ),
}
LACKS = {re.sub(r".*/test_(\w+)\.py", r"\1", name) for name in WITHOUT}  # files of a room that this copy lacks
NAMED = sorted({test for proven in TABLE.values() for test in proven.tests if test.partition("::")[0] not in LACKS})


@cache
def names_in(stem):
    """The names of the tests in a file, without test_; empty if there is no such file."""
    (path,) = [*TESTS.rglob(f"test_{stem}.py")] or [None]
    tree = ast.parse(path.read_text(encoding="utf-8")) if path is not None else ast.Module([], [])
    return {node.name.removeprefix("test_") for node in tree.body if getattr(node, "name", "").startswith("test_")}


def test_every_fault_is_there_and_has_tests_or_a_reason():
    assert list(TABLE) == [f"F{number}" for number in range(1, 29)]
    assert [number for number, proven in TABLE.items() if bool(proven.tests) is bool(proven.untested)] == []


@pytest.mark.parametrize("named", NAMED)
def test_a_named_test_exists(named):
    stem, _, name = named.partition("::")
    assert name in names_in(stem), f"there is no test {named}: name the test that proves the fault now"


def test_the_page_has_each_fault_and_the_files_of_its_tests():
    rows = {cells[0]: cells for cells in re.findall(r"^\| (F\d+) \| ([^|]+) \| ([^|]+) \| ([^|]+) \|$", PAGE, re.M)}
    assert list(rows) == list(TABLE)
    for number, proven in TABLE.items():
        _, fault, happens, files = rows[number]
        assert fault == proven.fault and len(happens) > 10, number
        found = set(re.findall(r"`tests/\w+/test_(\w+)\.py`", files))
        assert found == {test.partition("::")[0] for test in proven.tests}, number
        assert proven.tests or files.strip() == proven.untested, number
