"""The fault matrix: what may break, which promises hold all the same, and the tests that show it.

``docs/faults.md`` shows this table; ``test_matrix_table.py`` holds the two together, and proves that every row of the tables of
``docs/protocol.md`` about crashes and damage is in it. A test is named by its file below ``tests/`` and its function.
"""

from __future__ import annotations

from dataclasses import dataclass

PROMISES = {
    1: "exactly once",
    2: "nothing committed is lost",
    3: "same weights",
    4: "no zombie",
    5: "no silent corruption",
    6: "honest lag",
    7: "it stops rather than burns",
}


@dataclass(frozen=True)
class Row:
    """One thing that may break."""

    fault: str
    promises: tuple[int, ...]
    tests: tuple[str, ...]
    protocol: tuple[str, ...] = ()
    """Rows of ``docs/protocol.md`` that it stands for, as ``heading: first cell``."""


_KILLED = "end_to_end/test_killed.py"
_HANGS = "end_to_end/test_hangs_and_losses.py"
_BROADCAST = "end_to_end/test_broadcast.py"
_BAD = "end_to_end/test_bad_input.py"
_FULL = "faults/test_matrix_disk_full.py"
_CORRUPT = "faults/test_matrix_corruption.py"
_WRITERS = "faults/test_matrix_writers.py"
_PLACES = "faults/test_matrix_places.py"
_RECIPES = "faults/test_matrix_recipes.py"
_TAKEOVER = "unit/store/test_takeover.py"
_CRASH = "faults/crash/test_crash_points.py"
_SURVIVES = "slurm/test_run_survives.py"
_UNFINISHED = "unit/rollout/test_saving_and_continuing.py"

PROCESSES = (
    Row(
        "a rollout worker is killed",
        (1, 3),
        (
            f"{_KILLED}::test_a_killed_worker_and_a_killed_rank_are_replaced",
            "faults/test_drill_command.py::test_one_fault",
        ),
        ("One process only: rollout worker",),
    ),
    Row(
        "a rollout worker hangs",
        (1, 3),
        (f"{_HANGS}::test_a_process_that_hangs_is_found_by_its_heartbeat",),
        ("One process only: a process that hangs",),
    ),
    Row(
        "a rollout node is lost",
        (1, 3),
        (
            "faults/test_matrix_processes.py::test_a_lost_rollout_node_and_then_a_lost_controller",
            f"{_SURVIVES}::test_a_lost_node",
        ),
    ),
    Row(
        "a trainer rank is killed",
        (2, 3),
        (f"{_KILLED}::test_a_killed_worker_and_a_killed_rank_are_replaced",),
        ("One process only: a trainer rank",),
    ),
    Row(
        "a rollout worker or the trainer is killed, hangs or is slow in the middle of a broadcast",
        (1, 3, 5),
        (
            f"{_BROADCAST}::test_a_worker_and_the_trainer_killed_in_the_middle_of_broadcasts",
            f"{_BROADCAST}::test_a_worker_that_hangs_in_the_middle_of_a_broadcast",
            f"{_BROADCAST}::test_each_fault_at_each_point",
            "unit/broadcast/test_rounds.py::test_a_worker_that_is_lost_in_the_middle",
            "unit/broadcast/test_rounds.py::test_a_trainer_that_dies_in_the_middle",
            "unit/broadcast/test_rounds.py::test_a_worker_that_is_too_slow_is_named",
        ),
        ("One process only: a rollout worker, or the trainer, in the middle of a broadcast",),
    ),
    Row("a collective hangs", (3,), (f"{_HANGS}::test_a_process_that_hangs_is_found_by_its_heartbeat",)),
    Row(
        "a trainer node is lost, the whole job is requeued",
        (1, 2, 3),
        (
            f"{_KILLED}::test_killed_after_a_few_steps_and_continued",
            f"{_SURVIVES}::test_a_lost_node",
            "slurm/test_run_ends_well.py::test_requeued_by_hand",
        ),
    ),
    Row(
        "time limit, preemption with a warning",
        (2, 3),
        (
            f"{_KILLED}::test_stopped_by_a_signal_it_checkpoints_and_exits_with_75",
            "slurm/test_run_ends_well.py::test_time_limits_are_passed_by_a_chain_of_starts",
            f"{_SURVIVES}::test_preemption",
        ),
    ),
    Row(
        "a stop in the middle of episodes, and a kill while they are saved or continued",
        (1, 2, 6),
        (
            "end_to_end/test_unfinished_episodes.py::test_every_token_that_was_drawn_is_in_the_end",
            f"{_UNFINISHED}::test_interrupted_again_and_again",
            f"{_UNFINISHED}::test_killed_before_the_older_file_is_deleted",
            f"{_UNFINISHED}::test_killed_after_reading_it_the_file_is_used_again",
            "unit/store/test_unfinished_files.py::test_files_of_groups_that_are_done_go",
        ),
        tuple(
            f"While unfinished episodes are saved and continued: {moment}"
            for moment in (
                "while a file of unfinished episodes is written",
                "after its commit, before an older file of the block is deleted",
                "after a worker has read it, before the block's trajectories are committed",
                "after the block's trajectories are committed, before the file is deleted",
            )
        ),
    ),
    Row(
        "everything is killed at any moment",
        (1, 2, 3),
        (
            f"{_KILLED}::test_killed_at_random_moments",
            f"{_CRASH}::test_some_crash_points",
            f"{_CRASH}::test_every_crash_point",
            "unit/weights/test_publisher_team.py::test_a_rank_that_dies_in_the_middle",
        ),
        (
            "While a run is made and taken over: before `run.json`",
            "While a run is made and taken over: after `run.json`, before the incarnation record",
            "While a run is made and taken over: during the survey",
            "While a run is made and taken over: after the incarnation record, during the sweep",
            "In step k: 1 after a lease was handed out",
            "In step k: 2a while a trajectory file is written",
            "In step k: 2b after its commit, before the controller was told",
            "In step k: 3a while rank 0 reads the groups, or before the record's commit",
            "In step k: 3b after the record's commit",
            "In step k: 4 during the optimizer step",
            "In step k: 5a while payload is written, by any rank",
            "In step k: 5b after the manifest's commit, before anybody was told",
            "In step k: 6a while shards are written",
            "In step k: 6b after the manifest's commit",
            "In step k: 7a while a checkpoint is deleted",
            "In step k: 7b while versions are retired",
            "In step k: after the last checkpoint",
        ),
    ),
    Row(
        "the controller is killed",
        (1, 2, 3),
        (
            "faults/test_matrix_processes.py::test_a_lost_rollout_node_and_then_a_lost_controller",
            f"{_KILLED}::test_a_killed_controller_takes_its_roles_with_it",
            f"{_SURVIVES}::test_a_dead_controller_leads_to_a_new_start",
        ),
        ("One process only: controller",),
    ),
    Row(
        "two controllers at once",
        (4,),
        (
            "end_to_end/test_undisturbed.py::test_a_second_controller_is_refused_while_the_first_lives",
            f"{_TAKEOVER}::test_of_several_at_once_exactly_one_wins",
        ),
    ),
    Row(
        "a dead node still writes",
        (1, 4),
        (
            f"{_TAKEOVER}::test_what_a_zombie_commits_after_the_seal_does_not_count",
            "faults/interleaved/test_interleaved.py::test_no_schedule_breaks_the_protocol",
            "faults/test_drill_command.py::test_acts_from_outside",
            f"{_SURVIVES}::test_a_stopped_worker_is_replaced_and_its_revival_changes_nothing",
        ),
    ),
    Row(
        "a role dies again and again",
        (7,),
        (f"{_KILLED}::test_a_role_that_keeps_dying_stops_the_run_and_says_why",),
    ),
    Row(
        "an evaluator is killed at any moment, again and again, or cannot work",
        (1, 2, 3),
        (
            "end_to_end/test_evaluation.py::test_a_killed_evaluator_is_replaced_and_makes_what_is_missing_once",
            "end_to_end/test_evaluation.py::test_evaluation_changes_no_bit_of_the_training",
            "unit/evaluation/test_evaluating.py::test_killed_before_any_of_its_mutations_the_next_one_goes_on",
            "unit/controller/test_evaluator_deaths.py::test_it_is_started_again_and_then_off_while_the_run_goes_on",
        ),
    ),
    Row(
        "tracking dies, its database is locked or cannot be written",
        (2,),
        (
            f"{_PLACES}::test_training_goes_on_without_a_place_for_curves",
            f"{_PLACES}::test_a_locked_database_is_said_at_once",
            "unit/tracking/test_follow_events.py::test_one_mlflow_run_over_incarnations_with_each_step_once",
        ),
        ("One process only: tracking",),
    ),
    Row(
        "new weights come while samples are running",
        (6,),
        (
            "unit/engines/test_embedded_lifecycle.py::test_running_requests_go_on_under_new_weights",
            "end_to_end/test_undisturbed.py::test_staleness_is_exactly_what_the_recipe_says",
        ),
    ),
)

DISKS = (
    Row(
        "no space left, at work",
        (2, 3),
        (
            f"{_FULL}::test_a_disk_that_is_full_for_a_while_is_waited_out",
            f"{_FULL}::test_a_writer_that_finds_no_space_at_any_point_tries_again",
            f"{_WRITERS}::test_every_place_without_space",
        ),
    ),
    Row(
        "no space left, at a start",
        (2,),
        (
            f"{_BAD}::test_a_full_disk_at_the_start",
            f"{_FULL}::test_a_take_over_that_finds_no_space_stops_and_is_given_again",
            f"{_PLACES}::test_a_cache_on_a_full_disk",
        ),
    ),
    Row(
        "space does not come back",
        (2, 7),
        (f"{_BAD}::test_a_disk_that_fills_up_stops_the_run_and_nothing_is_lost",),
    ),
    Row(
        "no space left for unfinished episodes",
        (2, 7),
        (f"{_UNFINISHED}::test_without_space_it_says_so_and_goes",),
    ),
    Row("no quota left", (2, 3), (f"{_WRITERS}::test_some_places_without_space",)),
    Row(
        "one full target among many: no space for a file, free space in the filesystem",
        (2, 3),
        (
            f"{_FULL}::test_a_writer_that_finds_no_space_at_any_point_tries_again",
            "faults/habits/test_habits_life.py::test_runs_end_as_if_nothing_had_happened",
        ),
    ),
    Row(
        "I/O errors",
        (2, 3),
        (f"{_WRITERS}::test_some_places_that_are_refused", f"{_WRITERS}::test_every_place_that_is_refused"),
    ),
    Row(
        "the filesystem turns read-only at work",
        (2, 3, 7),
        ("faults/test_matrix_read_only.py::test_a_disk_that_turns_read_only_in_the_middle",),
    ),
    Row(
        "read-only, or no permission, at a start",
        (2,),
        (
            f"{_BAD}::test_a_read_only_directory",
            f"{_PLACES}::test_a_run_of_another_user_can_be_looked_at_and_not_changed",
            f"{_PLACES}::test_a_place_in_somebody_elses_directory",
            f"{_PLACES}::test_a_cache_that_cannot_be_written",
        ),
    ),
    Row(
        "a shared filesystem that shows things late, loses replies, keeps old listings",
        (1, 2, 3, 4),
        ("faults/habits/test_habits_life.py::test_runs_end_as_if_nothing_had_happened",),
    ),
)

DAMAGE = (
    Row(
        "wrong bytes in a broadcast",
        (3, 5),
        (
            "unit/broadcast/test_both_sides.py::test_other_bytes_than_the_published_ones_are_refused",
            "unit/broadcast/test_both_sides.py::test_any_flipped_byte_is_refused_before_use",
            "unit/broadcast/test_both_sides.py::test_with_both_every_bit_is_compared_with_the_files",
        ),
    ),
    Row(
        "bytes are flipped, cut off or added in any kind of artefact",
        (5,),
        (
            f"{_CORRUPT}::test_damage_is_found_before_it_is_used_and_named",
            "unit/audit/test_audit_violations.py::test_every_flipped_byte_is_found_and_named",
        ),
    ),
    Row(
        "damage that nothing can go around",
        (5, 7),
        (
            f"{_CORRUPT}::test_a_start_that_nothing_can_go_around_stops_and_touches_nothing",
            f"{_TAKEOVER}::test_a_missing_incarnation_record_below_another_stops_the_start",
            "unit/store/test_create.py::test_a_run_without_its_record_is_not_the_beginning_of_one",
        ),
        (
            "Damage: incarnation record, `run.json`, `recipe.yaml`",
            "Damage: a record that is missing below others (incarnations), or `run.json` missing beside artefacts",
        ),
    ),
    Row(
        "a damaged batch record",
        (1, 5),
        (
            f"{_CORRUPT}::test_records_are_gone_around",
            f"{_TAKEOVER}::test_a_broken_batch_record_ends_the_chain_there",
        ),
        ("Damage: batch record j",),
    ),
    Row(
        "damaged weights",
        (3, 5),
        (
            f"{_CORRUPT}::test_payload_is_gone_around",
            f"{_CORRUPT}::test_records_are_gone_around",
            f"{_HANGS}::test_weights_damaged_while_the_run_is_live_are_published_again",
            "unit/weights/test_publisher.py::test_a_replay_puts_lost_payload_back",
        ),
        (
            "Damage: manifest or payload of a version in the newest chain",
            "Damage: payload of a version that a replay passes",
        ),
    ),
    Row(
        "damaged retirements, and no full copy left",
        (3, 5),
        (
            f"{_CORRUPT}::test_records_are_gone_around",
            "end_to_end/test_retired_weights.py::test_a_run_that_lost_all_checkpoints_replays_past_its_retired_weights",
        ),
        ("Damage: `retired.json`", "Damage: every full copy from the base on"),
    ),
    Row(
        "a damaged checkpoint",
        (2, 5),
        (f"{_CORRUPT}::test_payload_is_gone_around", f"{_TAKEOVER}::test_no_checkpoint_is_whole"),
        ("Damage: shard of the newest checkpoint",),
    ),
    Row(
        "damaged or lost trajectories",
        (1, 5),
        (
            f"{_CORRUPT}::test_payload_is_gone_around",
            f"{_HANGS}::test_a_lost_trajectory_file_of_a_recorded_step_is_generated_again",
        ),
        ("Damage: trajectory file without a fate", "Damage: trajectory file that a batch record names"),
    ),
    Row(
        "damaged or unfit unfinished episodes",
        (5, 6),
        (
            f"{_UNFINISHED}::test_a_damaged_file_is_put_away_and_nothing_is_lost",
            f"{_UNFINISHED}::test_what_may_not_go_on_is_generated_from_the_start",
            "unit/trajectories/test_inflight_files.py::test_any_damage_is_found",
        ),
        ("Damage: file of unfinished episodes",),
    ),
)

INPUT = (
    Row(
        "a bad recipe, model or prompt file",
        (7,),
        (
            f"{_BAD}::test_an_unknown_key_names_the_nearest",
            f"{_BAD}::test_a_value_that_is_not_allowed",
            f"{_BAD}::test_a_prompt_file_with_broken_lines",
            f"{_RECIPES}::test_a_temperature_that_nothing_can_be_divided_by",
        ),
    ),
    Row(
        "a bad reward function; episodes that fail",
        (7,),
        (
            f"{_BAD}::test_a_reward_function_that_does_not_exist",
            f"{_BAD}::test_a_reward_function_that_always_fails_stops_the_run",
            "unit/environments/test_judge.py::test_nothing_of_the_users_ends_the_worker_or_spoils_the_record",
        ),
    ),
    Row(
        "values at the edge of what is allowed",
        (1, 3),
        (f"{_RECIPES}::test_sampling_at_its_edges", f"{_RECIPES}::test_a_reference_model_and_other_types"),
    ),
    Row(
        "another recipe at the next start",
        (1, 3),
        (
            f"{_RECIPES}::test_another_number_of_workers_is_honoured",
            f"{_RECIPES}::test_what_would_change_the_arithmetic_is_refused",
        ),
    ),
    Row(
        "a run directory with an odd name, or behind a link",
        (2,),
        (
            f"{_PLACES}::test_a_relative_place_behind_a_link_with_a_name_that_nobody_expects",
            f"{_PLACES}::test_a_name_that_cannot_be",
        ),
    ),
)

MATRIX = {"Processes": PROCESSES, "Disks": DISKS, "Damage": DAMAGE, "Input": INPUT}


def as_page() -> str:
    """The tables as ``docs/faults.md`` shows them."""
    parts = []
    for heading, rows in MATRIX.items():
        lines = [f"### {heading}", "", "| what breaks | promise | shown by |", "|---|---|---|"]
        for row in rows:
            promises = ", ".join(PROMISES[number] for number in row.promises)
            lines.append(f"| {row.fault} | {promises} | {'; '.join(f'`{test}`' for test in row.tests)} |")
        parts.append("\n".join(lines))
    return "\n\n".join(parts) + "\n"
