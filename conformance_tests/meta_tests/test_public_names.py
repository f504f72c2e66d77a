"""The public names, listed: adding or removing one is a decision, not an accident."""

from __future__ import annotations

from importlib import import_module

import pytest

NAMES = {
    "gradaccum": """
        ArgumentTypeError ArgumentValueError AutoMicroBatchSize BackendNotFoundError Cause CheckpointError DynamicLossScale GradAccumError
        GradientError LinearityReport LossScale MissingPackageError StaticLossScale StepResult UsageError VerificationReport Watch
        Window Windows available_backends effective_batch_size load_backend registered_backends scaled_learning_rate until_weight verify
        windows wrap
    """,
    "gradaccum.kit": """
        Backend Decision FIELD_DTYPES FORMAT Fields GatingBackend Options ROUNDINGS SCALES Scalar ScaleRule ScalerDriver Schedule State
        Terms Where
        accumulate accumulate_dtype_error at_rest close comparable contribution decide decode_terms discard divisor encode_terms ends
        explain has_exact_inverse initial_state joined largest_number linearity_report make_options missing_worker_error
        half_made_error optimizer_error relative_error require_bool require_classes require_format
        require_loss_options require_shard_sizes require_steps require_weight
        redistributed resumed select steps_at terms_of torn_window_error update_due_error usable wrapped_twice_error
        KINDS MergingOps concatenate_error finished kinds_of merged require_kind share
        ITEMS Leaf Nest children_of is_column leaves_of mapped mark_lists spread with_leaves
        Cut Division Reduction aux_shape_error cuts divided item_weights_error make_division packed require_item_weights require_items
        require_one_size require_reduction scalar_loss_error require_micro_batch_size too_small_error unknown_limit_error
        segment_cuts DeviceBackend
        ROUNDING_LIMIT Column Conditions HostRandom Layer Precision Run Subject VerifyingBackend as_loss examine free_frames item_axis
        Handle Listener Listeners described status
        Noise NoiseFields UntilWeight add_loss code_of first_seen forget_window is_first is_known joined_noise measures no_noise noise_scale
        noise_shares window_loss window_seen shared_until_weight_error rate_bits require_same_rates moving_weight_error
    """,
    "gradaccum.watching": """
        ClosedWindow JsonLines Listener RichProgress TensorBoard Watch
    """,
    "gradaccum_torch": """
        AccumulatingOptimizer GatedScheduler TorchBackend backend backward coupled_backward recompute redistributed sharded_cross_entropy
        verify verify_loss_scaling
    """,
    "gradaccum_jax": """
        AccumulationState MultiSteps apply_updates backend check_state coupled_value_and_grad data_parallel describe discard
        flush recompute redistributed result scale_loss sharded_cross_entropy value_and_grad value_and_update verify verify_loss_scaling
    """,
    "gradaccum_mindspore": """
        AccumulatingExperimentalOptimizer AccumulatingOptimizer Accumulator FlushAtEpochEnd TrainOneStepCell WatchWindows backend
        coupled_value_and_grad load_checkpoint_into recompute redistributed sharded_cross_entropy value_and_grad value_and_update verify
        verify_loss_scaling
    """,
}


@pytest.mark.parametrize("package", NAMES)
def test_the_list_is_the_list(package: str) -> None:
    try:
        module = import_module(package)
    except ModuleNotFoundError as error:
        pytest.skip(f"{package} needs {error.name}, which is not installed")
    assert sorted(module.__all__) == sorted(NAMES[package].split())
    assert all(hasattr(module, name) for name in module.__all__)
