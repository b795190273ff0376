"""Where each of the field's commonest failures in multi-turn tool training is tested. The index is checked, so that it
cannot name a test that is no longer there."""

import ast
from pathlib import Path

import pytest

TESTS = Path(__file__).parent

INDEX: dict[str, tuple[str, ...]] = {
    "1: the line break after the end of a turn is lost": (
        "rollout_sidecar/test_conversation.py::test_separator_after_the_end_of_turn_is_kept",
        "rollout_sidecar/test_conversation.py::test_appending_gives_the_ids_of_the_whole_conversation",
        "rollout_sidecar/test_templates.py::test_qwen3_appends_what_its_template_writes",
    ),
    "2: sampled tokens are tokenised again": (
        "rollout_sidecar/test_conversation.py::test_sampled_ids_are_never_tokenised_again",
        "rollout_sidecar/test_conversation.py::test_any_sampled_ids_survive",
        "rollout_sidecar/test_pain_points_conversation.py"
        "::test_ids_of_a_call_in_unusual_spelling_reach_the_trajectory_unchanged",
        "rollout_sidecar/test_conversation_policies.py::test_sampled_ids_that_no_tokenizer_would_give_are_no_reason_to_fork",
    ),
    "3: the template strips earlier thinking": (
        "rollout_sidecar/test_conversation_policies.py::test_qwen3_forks_where_it_drops_the_thinking",
        "rollout_sidecar/test_conversation_policies.py::test_policies_agree_where_the_template_only_appends",
        "rollout_sidecar/test_conversation_policies.py::test_reject_names_what_was_rewritten",
        "tooljax/test_update.py::test_a_trajectory_of_two_streams_gives_the_loss_and_gradient_of_two_rows",
        "rollout_sidecar/test_agent_streams.py::test_fork_begins_a_stream_with_what_the_template_shows_then",
    ),
    "4: a reward on a masked last token is lost": (
        "tooljax/test_training_batch.py::test_advantages_reach_exactly_the_sampled_tokens",
        "tooljax/test_training_batch.py"
        "::test_reinforce_plus_plus_puts_the_reward_on_the_last_trained_token",
        "tooljax/test_pain_points_training.py"
        "::test_a_reward_reaches_the_sampled_tokens_of_a_trajectory_that_ends_in_an_observation",
    ),
    "5: rewards of tools are dropped": (
        "rollout_sidecar/test_agent.py::test_rewards_of_tools_are_weighted_terms",
        "rollout_sidecar/test_agent.py::test_rewards_of_tools_that_are_ignored_are_warned_about_once",
        "rollout_sidecar/test_scoring.py::test_rewards_of_calls_and_of_the_whole_trajectory_add_up_by_tool",
        "rollout_sidecar/test_scoring.py::test_what_is_ignored_is_warned_about_once",
        "rollout_sidecar/test_interactions.py::test_turn_scores_are_merged_into_the_reward",
    ),
    "6: what a tool says earns the reward": (
        "rollout_sidecar/test_rewards.py::test_tool_output_earns_no_reward",
        "rollout_sidecar/test_agent.py::test_a_tool_cannot_earn_the_reward_for_the_policy",
        "rollout_sidecar/test_scoring.py::test_a_tool_cannot_earn_the_reward_unless_its_text_is_asked_for",
    ),
    "7: the policy stops calling tools": (
        "tooljax/test_reward_weights.py"
        "::test_weights_reach_the_reward_and_evaluations_are_scored_without_them",
        "tooljax/test_reward_weights.py::test_shaping_falls_linearly_and_the_length_penalty_stays",
        "tooljax/test_metrics.py::test_accuracy_with_and_without_tools",
        "rollout_sidecar/test_metrics_sidecar.py::test_the_gauges_of_the_sidecar_are_the_trainer_s_metrics",
        "tooljax/test_guards.py::test_a_policy_that_stops_calling_tools",
        "tooljax/test_evaluate.py"
        "::test_the_tools_are_what_makes_the_difference_and_nothing_else_is_changed",
    ),
    "8: the policy collapses after a few hundred steps": (
        "tooljax/test_guards.py::test_what_an_update_shows",
        "tooljax/test_guards.py::test_truncation_is_known_before_the_update",
        "tooljax/test_guards.py::test_reward_that_rises_while_accuracy_falls",
        "tooljax/test_update_limits.py::test_beyond_a_limit_weights_and_moments_stay",
        "tooljax/test_guarded_runs.py::test_skip_leaves_the_update_out_and_goes_on",
        "tooljax/test_guarded_runs.py"
        "::test_rollback_takes_the_weights_of_the_newest_checkpoint_and_the_data_goes_on",
    ),
    "9: engine and trainer compute other log-probs": (
        "tooljax/test_sampling.py::test_temperature_sharpens",
        "tooljax/test_sampling.py::test_top_p_keeps_the_fewest_tokens_that_hold_it",
        "tooljax/test_sampler.py::test_log_probs_are_the_trainers",
        "pallas_kernels/test_token_log_probs.py::test_a_case_worked_by_hand",
        "tooljax/test_config.py::test_settings_that_contradict_each_other",
        "tooljax/test_log_prob_gate.py::test_two_sound_sides_agree_to_rounding",
        "tooljax/test_log_prob_gate.py::test_a_trainer_that_forgets_the_temperature",
        "tooljax/test_log_prob_gate.py::test_an_engine_at_another_temperature",
        "tooljax/test_log_prob_gate.py"
        "::test_an_engine_that_truncates_and_reports_log_probs_of_what_it_kept",
        "tooljax/test_log_prob_gate.py::test_an_engine_that_rounds_its_logits",
        "sglang/test_engine_sglang.py::test_log_probs_are_those_of_the_weights",
        "sglang/test_engine_sglang.py::test_log_probs_of_a_cut_distribution_are_renormalised",
    ),
    "10: thinking text holds a call": (
        "rollout_sidecar/test_formats.py::test_thinking_text_holds_no_calls",
        "rollout_sidecar/test_templates.py::test_thinking_that_the_prompt_opened_hides_calls",
        "rollout_sidecar/test_pain_points_conversation.py::test_a_call_in_thinking_text_is_not_run",
        "rollout_sidecar/test_formats_round_trip.py::test_thinking_holds_no_calls",
        "rollout_sidecar/test_formats_calls.py::test_calls_in_thinking_do_not_count_when_the_prompt_opened_it",
    ),
    "11: a call that cannot be read ends the trajectory": (
        "rollout_sidecar/test_tool_session.py::test_bad_json_is_answered_and_generation_continues",
        "rollout_sidecar/test_tool_session.py"
        "::test_consecutive_turns_without_an_executable_call_end_the_trajectory",
        "tooljax/test_metrics.py::test_tool_calls",
        "rollout_sidecar/test_formats_errors.py::test_a_failed_attempt_is_reported_with_its_reason",
        "rollout_sidecar/test_formats_errors.py::test_a_bad_call_does_not_hide_the_next",
    ),
    "12: parallel calls beyond a limit vanish": (
        "rollout_sidecar/test_tool_session.py::test_calls_beyond_the_limit_are_answered_too",
        "rollout_sidecar/test_tool_session.py::test_results_come_in_the_order_of_the_calls",
    ),
    "13: a hanging tool stalls the step": (
        "rollout_sidecar/test_mcp_resilience.py"
        "::test_a_call_past_its_deadline_is_cancelled_on_the_server",
        "rollout_sidecar/test_mcp_resilience.py::test_a_server_that_stops_reacting_over_http",
        "rollout_sidecar/test_tool_session.py::test_a_hanging_tool_costs_its_deadline_and_no_more",
        "rollout_sidecar/test_tool_session.py"
        "::test_a_tool_that_ignores_cancellation_cannot_hold_up_the_trajectory",
        "rollout_sidecar/test_agent.py"
        "::test_the_trajectory_deadline_keeps_what_was_sampled_and_releases_tools",
        "rollout_sidecar/test_client.py::test_a_sidecar_that_takes_too_long_is_a_timeout",
        "rollout_sidecar/test_http.py::test_a_server_that_never_answers",
        "rollout_sidecar/test_http.py::test_a_server_that_trickles_is_bounded_in_total",
        "rollout_sidecar/test_interactions.py::test_an_interaction_that_hangs_costs_its_deadline",
        "rollout_sidecar/test_chaos.py::test_no_fault_of_a_tool_crashes_stalls_or_leaks",
        "tooljax/test_quorum.py::test_stragglers_of_a_group_with_a_quorum_are_aborted_and_the_rest_is_in_order",
    ),
    "14: an MCP server forgets between calls": (
        "rollout_sidecar/test_mcp_tools.py::test_a_session_lasts_for_the_trajectory_and_is_its_own",
        "rollout_sidecar/test_stock_verl_files.py::test_mcp",
    ),
    "15: a tool forgets between calls": (
        "rollout_sidecar/test_tool_session.py"
        "::test_a_tool_keeps_its_state_for_the_trajectory_and_is_released_once",
        "rollout_sidecar/test_tool_session.py::test_cancelling_releases_tools_exactly_once",
        "rollout_sidecar/test_rollout_stream.py::test_an_abort_releases_tools_and_ends_the_stream",
        "rollout_sidecar/test_stock_verl_files.py::test_a_users_classes_run_unmodified",
        "rollout_sidecar/test_tool_session_profiles.py::test_cancelling_releases_per_call_instances_exactly_once",
    ),
    "16: sandboxes time out silently and leak": (
        "rollout_sidecar/test_python_sandbox_tool.py::test_the_policy_is_told_which_limit_it_hit",
        "rollout_sidecar/test_python_sandbox_pool.py"
        "::test_no_sandbox_is_left_of_64_that_were_given_up",
        "rollout_sidecar/test_python_sandbox_pool.py"
        "::test_a_sidecar_that_is_killed_takes_its_sandboxes_with_it",
        "rollout_sidecar/test_sandbox_fusion.py::test_a_time_limit_is_named_and_keeps_the_output",
        "rollout_sidecar/test_sandbox_fusion_session.py"
        "::test_waiting_for_a_place_is_not_time_in_the_tool",
    ),
    "17: what fits exactly is dropped, or sampled tokens are cut": (
        "rollout_sidecar/test_agent.py"
        "::test_an_observation_that_fits_exactly_is_kept_and_then_the_trajectory_stops",
        "rollout_sidecar/test_agent.py::test_an_observation_one_token_too_long_loses_its_middle",
        "rollout_sidecar/test_agent.py"
        "::test_an_observation_whose_frame_does_not_fit_is_left_out_and_sampled_tokens_stay",
        "rollout_sidecar/test_agent.py::test_results_are_cut_in_tokens_not_in_characters",
        "rollout_sidecar/test_truncation.py::test_what_left_keeps_depends_on_the_release_of_verl",
    ),
    "18: the denominator of the loss depends on how the batch is cut": (
        "tooljax/test_update.py::test_cutting_a_batch_into_microbatches_does_not_change_the_gradient",
        "tooljax/test_update_mesh.py::test_every_mesh_and_cut_gives_the_update_of_one_device",
        "tooljax/test_update.py::test_untrained_items_are_out_of_numerator_and_denominator",
        "tooljax/test_aggregation.py::test_parts_add_up_to_the_whole_however_it_is_cut",
        "rollout_sidecar/test_pain_points_conversation.py"
        "::test_assistant_turns_of_the_prompt_are_not_trained_on",
    ),
    "19: fixed regions waste padding and cut prompts": (
        "rollout_sidecar/test_agent.py::test_a_prompt_that_is_too_long_is_rejected_whole",
        "tooljax/test_batch.py::test_padding_of_packed_rows_is_small",
        "tooljax/test_batch.py::test_a_trajectory_longer_than_every_row_is_refused",
        "e2e/test_resume.py::test_prompts_over_the_limit_are_rejected_and_counted",
    ),
    "20: groups without variance pull by rounding noise": (
        "tooljax/test_advantages.py::test_groups_without_variance_get_exactly_zero",
        "tooljax/test_advantages.py::test_float64_rewards_that_differ_by_rounding_are_flagged",
        "tooljax/test_training_batch.py::test_skipped_groups_leave_the_denominator",
        "tooljax/test_refill.py"
        "::test_groups_that_teach_nothing_are_replaced_and_what_is_beyond_a_batch_is_left_out",
    ),
    "21: prefixes of old weights are read on, and versions mislabelled": (
        "tooljax/test_sampler.py::test_new_weights_leave_nothing_of_the_old",
        "rollout_sidecar/test_engine_jax.py::test_new_weights_serve_as_if_they_had_been_loaded",
        "rollout_sidecar/test_engine_jax.py"
        "::test_running_turns_end_under_the_old_weights_and_later_ones_wait",
        "rollout_sidecar/test_in_flight.py::test_the_embedded_engine_names_the_version_of_every_token",
        "rollout_sidecar/test_in_flight.py"
        "::test_what_is_under_way_goes_on_or_finishes_and_new_ones_get_the_new_weights",
        "sglang/test_engine_sglang.py::test_weights_are_swapped_between_two_tokens",
        "sglang/test_sidecar_sglang.py::test_pushed_weights_are_those_of_a_cold_engine",
    ),
    "22: a weight update breaks the server, leaks or is half done": (
        "rollout_sidecar/test_weights.py"
        "::test_a_flipped_bit_is_refused_by_name_and_the_old_version_stays",
        "rollout_sidecar/test_weight_deltas.py::test_a_damaged_delta_is_refused_and_undone",
        "rollout_sidecar/test_weight_deltas.py::test_there_is_never_a_second_copy",
        "rollout_sidecar/test_weight_senders.py::test_half_a_part_is_no_part",
        "rollout_sidecar/test_weight_senders.py::test_a_late_copy_of_a_part_changes_nothing",
        "tooljax/test_push_delta.py::test_a_byte_flipped_on_the_way_is_sent_again_whole",
        "tooljax/test_push_delta.py::test_the_base_moves_only_when_every_sidecar_has_acknowledged",
        "tooljax/test_fleet.py"
        "::test_a_replica_that_is_killed_and_started_again_serves_the_weights_before_it_is_used",
        "tooljax/test_fleet_chaos.py::test_kills_at_random_moments",
        "tooljax/test_fleet_faults.py"
        "::test_of_two_trainers_that_push_at_once_one_wins_and_the_other_is_told",
        "tooljax/test_fleet_faults.py"
        "::test_a_sidecar_whose_disk_is_full_keeps_what_it_has_and_is_not_used_until_it_has_the_new",
        "tooljax/test_pain_points_weights.py::test_pushes_leave_no_memory_behind",
    ),
    "23: a resumed run is not the run that was interrupted": (
        "e2e/test_resume.py::test_killed_at_any_step_it_resumes_bit_identically",
        "e2e/test_resume.py::test_a_preempted_run_saves_within_its_grace_period_and_resumes",
        "tooljax/test_source.py::test_a_restored_source_goes_on_exactly",
        "tooljax/test_source.py::test_a_position_in_other_data_is_refused",
        "tooljax/test_checkpoint.py::test_an_interrupted_save_is_not_seen",
    ),
    "24: metrics mislead": (
        "tooljax/test_metrics.py::test_pass_at_k_by_hand",
        "tooljax/test_evaluation_report.py::test_differences_are_paired_by_problem",
        "rollout_sidecar/test_rewards.py"
        "::test_numbers_of_a_dict_are_metrics_and_may_differ_from_row_to_row",
        "tooljax/test_reward_weights.py::test_unscored_trajectories_are_counted_and_are_in_no_mean",
    ),
    "25: stop ids are stripped, doubled or run through": (
        "rollout_sidecar/test_tokenizer.py::test_stop_ids_are_the_union_of_every_source",
        "rollout_sidecar/test_tokenizer.py::test_normalised_turn_ends_in_its_stop_id_exactly_once",
        "rollout_sidecar/test_conversation.py"
        "::test_end_of_turn_that_was_not_sampled_is_inserted_without_loss",
        "rollout_sidecar/test_pain_points_conversation.py"
        "::test_an_engine_that_runs_past_a_stop_id_is_an_engine_error",
        "rollout_sidecar/test_pain_points_conversation.py"
        "::test_the_stop_id_is_there_once_and_is_trained_on_though_it_is_the_padding_too",
        "rollout_sidecar/test_templates.py::test_a_turn_that_ends_with_the_next_messages_first_token",
        "rollout_sidecar/test_certification.py::test_a_token_that_ends_turns_and_would_not_stop_the_policy_is_told",
        "rollout_sidecar/test_formats_harmony.py::test_stop_texts_are_the_library_s_stop_tokens",
    ),
}


@pytest.mark.parametrize("failure", INDEX)
def test_every_named_test_is_there_and_runs(failure):
    for node in INDEX[failure]:
        file, _, name = node.partition("::")
        tree = ast.parse((TESTS / file).read_text(encoding="utf-8"))
        # At the top level: pytest does not run what is defined inside another function.
        found = [
            item
            for item in tree.body
            if isinstance(item, (ast.FunctionDef, ast.AsyncFunctionDef)) and item.name == name
        ]
        assert len(found) == 1, f"{node}: found {len(found)} times"
        skipped = [ast.unparse(d) for d in found[0].decorator_list if "skip" in ast.unparse(d)]
        assert not skipped, f"{node} is switched off: {skipped}"
