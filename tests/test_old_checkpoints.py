"""Checkpoints that other projects wrote become ours: every number, then every scale
and the step that follow."""

import copy
import math
from typing import Any

import pytest
import torch

from fp16core import DynamicLossScaler, FP16_Optimizer, LossScaler
from helpers import assert_same, copy_of, half, masters, single, train
from relatives import ENTRIES, Target, named, read

pytestmark = pytest.mark.usefixtures("one_thread")


def load(name: str, model_first: bool = True, by_name: bool = False) -> Target:
    """Return the target of an entry after loading its file, whole."""
    target = Target(ENTRIES[name], by_name)
    saved = read(name)
    if model_first:
        target.model.load_state_dict(saved["model"])
    target.optimizer.load_state_dict(saved, model=None if by_name else target.model)
    if not model_first:
        target.model.load_state_dict(saved["model"])
    return target


APEX, CORE = "apex_fp16_utils_adam.pt", "megatron_core_adam.pt"
FUSED, UNFUSED = "deepspeed_fused_adam.pt", "deepspeed_unfused_adam.pt"
FLAT, AMP = "fairseq_adam_flat.pt", "apex_amp_o2_adam.pt"
TORCH = "torch_amp_adam.pt"
every_file = pytest.mark.parametrize("name", ENTRIES)


@every_file
@pytest.mark.parametrize("by_name", [False, True], ids=["model", "names"])
@pytest.mark.parametrize("model_first", [True, False], ids=["before", "after"])
def test_weights_and_state_are_those_of_the_file(
    name: str, model_first: bool, by_name: bool
) -> None:
    entry = ENTRIES[name]
    target = load(name, model_first, by_name)
    assert_same(target.masters(), named(entry["masters"]))
    weights = dict(target.model.named_parameters())
    for parameter, want in named(entry["native"]).items():
        assert_same(weights[parameter].detach(), want)
    for parameter, master in target.masters().items():
        weight = weights[parameter].detach()
        assert_same(weight, master.to(weight.dtype))
    state = target.state()
    assert set(state) == set(entry["state"])
    for parameter, said in entry["state"].items():
        assert set(state[parameter]) == set(said)
        for key, want in said.items():
            got = state[parameter][key]
            if key == "step":
                assert isinstance(got, torch.Tensor)
                assert got.item() == want
            else:
                assert_same(got, torch.tensor(want, dtype=torch.float32))


@every_file
def test_hyper_parameters_are_those_of_the_file(name: str) -> None:
    target = load(name)
    groups = target.optimizer.param_groups
    for group, said in zip(groups, ENTRIES[name]["hyperparameters"], strict=True):
        for key, want in said.items():
            got = list(group[key]) if key == "betas" else group[key]
            assert got == want, key


COUNTERS: dict[str, Any] = {
    "scale": "cur_scale",
    "loss_scale": "cur_scale",
    "_loss_scale": "cur_scale",
    "hysteresis_tracker": "cur_hysteresis",
    "growth_factor": "scale_factor",
    "growth_interval": "scale_window",
    "_scale_seq_len": "scale_window",
    "_min_loss_scale": "min_scale",
    "_max_loss_scale": "max_scale",
    "_iter": "cur_iter",
    "_last_overflow_iter": "last_overflow_iter",
    "_last_rescale_iter": "last_rescale_iter",
    "_overflows_since_rescale": "overflows_since_rescale",
}
CLEAN_UPDATES = ("unskipped", "_unskipped", "growth_tracker", "_growth_tracker")


@every_file
def test_scale_and_counters_are_those_of_the_file(name: str) -> None:
    entry = ENTRIES[name]
    optimizer = load(name).optimizer
    scaler = optimizer.loss_scaler
    assert optimizer.overflow is entry["pending_overflow"]
    policy = entry["scaler"]["policy"]
    assert optimizer.dynamic_loss_scale is (policy not in ("static", None))
    assert optimizer.loss_scale == (entry["loss_scale"] or 128.0)
    if not optimizer.dynamic_loss_scale:
        return
    for counter, want in entry["scaler"]["counters"].items():
        if counter in CLEAN_UPDATES:
            got = scaler.cur_iter - 1 - scaler.last_overflow_iter
        elif counter in ("dynamic", "dynamic_loss_scale", "_has_overflow"):
            continue
        else:
            got = getattr(scaler, COUNTERS.get(counter, counter))
        # At a tracker of 0 too the next overflow lowers the scale.
        assert got == (max(want, 1) if counter == "hysteresis_tracker" else want)


@every_file
def test_the_next_scales_are_those_of_the_project(name: str) -> None:
    scaler = load(name).optimizer.loss_scaler
    for said in ENTRIES[name]["next_scales"]:
        going = copy.copy(scaler)
        got = []
        for flag in said["overflow"]:
            going.update_scale(flag == "1")
            got.append(going.loss_scale)
        assert got == said["loss_scale"], said["overflow"]


def assert_close(got: Any, want: Any) -> None:
    """Assert equality up to the rounding of another kernel."""
    assert set(got) == set(want)
    for key in want:
        torch.testing.assert_close(got[key], want[key], rtol=0, atol=1e-6)


@every_file
def test_the_next_step_is_that_of_the_project(name: str) -> None:
    said = ENTRIES[name]["next_step"]
    target = load(name)
    assert target.optimizer.loss_scale == said["loss_scale"]
    target.step(named(said["gradients"]))
    assert target.optimizer.steps_applied == 1
    assert_close(target.masters(), named(said["masters"]))
    weights = {n: p.detach() for n, p in target.model.named_parameters()}
    assert_close({n: weights[n] for n in said["native"]}, named(said["native"]))
    assert target.optimizer.loss_scale == (said["loss_scale_after"] or 128.0)
    if "upstream_masters" in said:
        assert_close(target.masters(), named(said["upstream_masters"]))


@pytest.mark.parametrize(
    "name", [name for name, entry in ENTRIES.items() if "rounded_masters" in entry]
)
def test_without_names_the_masters_are_the_rounded_weights(name: str) -> None:
    entry = ENTRIES[name]
    target, saved = Target(entry), read(name)
    target.model.load_state_dict(saved["model"])
    target.optimizer.load_state_dict(saved)
    assert_same(target.masters(), named(entry["rounded_masters"]))
    report = target.optimizer.load_report
    assert report is not None
    assert "load_state_dict(..., model=model)" in report.not_restored["masters"]
    target.step(named(entry["next_step"]["gradients"]))
    want = named(entry["next_step_from_rounded_masters"]["masters"])
    assert_close(target.masters(), want)


@every_file
def test_the_optimizers_part_is_enough_where_all_is_in_it(name: str) -> None:
    entry = ENTRIES[name]
    target, saved = Target(entry), read(name)
    target.model.load_state_dict(saved["model"])
    before = target.optimizer.loss_scale
    target.optimizer.load_state_dict(saved["optimizer"])
    apart = "amp" in saved or "scaler" in saved
    want = before if apart else entry["loss_scale"] or 128.0
    assert target.optimizer.loss_scale == want
    assert_same(target.masters(), named(entry.get("rounded_masters", entry["masters"])))


@every_file
def test_loading_neither_changes_nor_shares_what_it_is_given(name: str) -> None:
    target, saved = Target(ENTRIES[name]), read(name)
    saved.pop("args", None)
    saved.pop("np_rng_state", None)
    kept = copy_of(saved)
    target.optimizer.load_state_dict(saved, model=target.model)
    target.step(named(ENTRIES[name]["next_step"]["gradients"]))
    assert_same(saved, kept)


@every_file
def test_what_was_loaded_goes_on_from_our_own_checkpoint(name: str) -> None:
    straight = load(name)
    resumed = Target(ENTRIES[name])
    resumed.model.load_state_dict(straight.model.state_dict())
    resumed.optimizer.load_state_dict(copy_of(straight.optimizer.state_dict()))
    gradients = named(ENTRIES[name]["next_step"]["gradients"])
    for target in (straight, resumed):
        target.step(gradients)
    assert_same(resumed.everything(), straight.everything())


# The report.


def test_a_report_says_what_was_restored_and_what_was_not() -> None:
    target = Target(ENTRIES["megatron_core_adam.pt"])
    assert target.optimizer.load_report is None
    target.optimizer.load_state_dict(read("megatron_core_adam.pt")["optimizer"])
    assert str(target.optimizer.load_report) == (
        "Loaded a checkpoint of Megatron-Core.\n"
        "Restored:\n"
        "  masters: 2 in fp32\n"
        "  moments: exp_avg, exp_avg_sq of 4 parameters\n"
        "  steps: of 4 parameters\n"
        "  hyper-parameters: of 2 groups\n"
        "  scale: 8192\n"
        "  counters: window, hysteresis\n"
        "Not restored:\n"
        "  counts of steps: not in the checkpoint; they stay\n"
        "  overflow flag: not in the checkpoint; it is cleared\n"
        "  min_scale, growth_factor, backoff_factor, growth_interval, hysteresis: "
        "not in the checkpoint; those of the present scaler stay"
    )


@every_file
def test_a_report_names_the_source_of_the_masters(name: str) -> None:
    report = load(name).optimizer.load_report
    assert report is not None
    assert "masters" in report.restored
    from_model = ENTRIES[name]["master_source"] != "checkpoint"
    assert ("source of masters" in report.restored) is from_model
    assert ("scale" in report.not_restored) is (
        ENTRIES[name]["scaler"]["policy"] in ("static", None)
        and not ENTRIES[name]["scaler"]["counters"]
    )


def test_our_own_checkpoints_have_a_report() -> None:
    param = half(1.0)
    optimizer = FP16_Optimizer(torch.optim.SGD([param], lr=0.5), verbose=False)
    train(optimizer, param.float().sum())
    optimizer.load_state_dict(optimizer.state_dict())
    report = optimizer.load_report
    assert report is not None
    assert report.format == "fp16core"
    assert report.restored["counts of steps"] == "1 applied, 0 skipped"
    assert not report.not_restored


# Scalers that are objects.


class OldScaler:
    """A scaler as projects pickle it, with whatever attributes."""

    def __init__(self, **attributes: Any) -> None:
        self.__dict__.update(attributes)


def seed_dict(optimizer: FP16_Optimizer, scaler: Any) -> dict[str, Any]:
    """Return the six keys of the original, with this scaler."""
    state = copy_of(optimizer.state_dict())
    keys = list(state)[:6]
    return {**{key: state[key] for key in keys}, "loss_scaler": scaler}


def of_one() -> FP16_Optimizer:
    return FP16_Optimizer(torch.optim.SGD([half(1.0)], lr=0.5), verbose=False)


def test_an_object_of_the_projects_own_class_is_read_too() -> None:
    optimizer = of_one()
    scaler = OldScaler(
        cur_scale=64.0,
        cur_iter=9,
        last_overflow_iter=4,
        scale_factor=2.0,
        scale_window=5,
        min_scale=2.0,
        delayed_shift=3,
        cur_hysteresis=2,
        consecutive_hysteresis=True,
    )
    optimizer.load_state_dict(seed_dict(optimizer, scaler))
    got = optimizer.loss_scaler
    assert type(got) is DynamicLossScaler
    for name, value in vars(scaler).items():
        assert getattr(got, name) == value, name


@pytest.mark.parametrize("kind", [LossScaler, DynamicLossScaler])
def test_a_scaler_of_ours_is_copied(kind: Any) -> None:
    optimizer, scaler = of_one(), kind(32.0)
    scaler.update_scale(True)
    optimizer.load_state_dict(seed_dict(optimizer, scaler))
    assert type(optimizer.loss_scaler) is kind
    assert optimizer.loss_scaler is not scaler
    assert repr(optimizer.loss_scaler) == repr(scaler)


def test_deepspeeds_scaler_object_has_its_late_window() -> None:
    optimizer = of_one()
    scaler = OldScaler(
        cur_scale=8.0,
        cur_iter=0,
        last_overflow_iter=-1,
        scale_factor=2.0,
        scale_window=2,
        min_scale=1.0,
        delayed_shift=1,
        cur_hysteresis=1,
        consecutive_hysteresis=False,
        raise_error_at_min_scale=False,
    )
    optimizer.load_state_dict(seed_dict(optimizer, scaler))
    got = []
    for _ in range(5):
        optimizer.loss_scaler.update_scale(False)
        got.append(optimizer.loss_scale)
    assert got == [8.0, 8.0, 16.0, 16.0, 32.0]


@pytest.mark.parametrize(
    "attributes, message",
    [
        ({}, "must hold a loss scaler, but got"),
        ({"cur_scale": 0.0}, "must hold a valid loss scaler, but got .*scale must be"),
        ({"cur_scale": "8"}, "must hold a valid loss scaler, but got '8' in the place"),
        ({"cur_scale": 8.0, "cur_iter": 3}, "without last_overflow_iter, scale_factor"),
        ({"_loss_scale": 8.0}, "without dynamic, _scale_seq_len"),
    ],
)
def test_a_scaler_that_makes_no_sense_is_refused(
    attributes: dict[str, Any], message: str
) -> None:
    optimizer = of_one()
    state = seed_dict(optimizer, OldScaler(**attributes))
    with pytest.raises(
        ValueError, match=f"^FP16_Optimizer.load_state_dict: .*{message}"
    ):
        optimizer.load_state_dict(state)
    assert optimizer.loss_scale == 1.0


# What a present scaler gives.


def test_parameters_that_a_file_lacks_are_those_of_the_present_scaler() -> None:
    target = Target(ENTRIES["megatron_v2_adam.pt"])
    target.optimizer.loss_scaler = DynamicLossScaler(
        scale_window=17, scale_factor=4.0, min_scale=8.0, delayed_shift=5
    )
    target.optimizer.load_state_dict(read("megatron_v2_adam.pt")["optimizer"])
    got = target.optimizer.loss_scaler
    assert (got.scale_window, got.scale_factor, got.backoff_factor) == (17, 4.0, 0.25)
    assert (got.min_scale, got.delayed_shift, got.cur_scale) == (8.0, 5, 2048.0)


def test_a_static_scaler_has_none_of_them_and_the_projects_defaults_stand() -> None:
    target = Target(ENTRIES["megatron_v2_adam.pt"])
    target.optimizer.loss_scaler = LossScaler(4.0)
    target.optimizer.load_state_dict(read("megatron_v2_adam.pt")["optimizer"])
    got = target.optimizer.loss_scaler
    assert (got.scale_window, got.delayed_shift, got.cur_scale) == (1000, 2, 2048.0)
    report = target.optimizer.load_report
    assert report is not None
    assert "the project's defaults stand" in str(report)


def test_apex_amp_has_a_scaler_for_each_loss() -> None:
    target, saved = Target(ENTRIES["apex_amp_o2_adam.pt"]), read("apex_amp_o2_adam.pt")
    saved["amp"]["loss_scaler1"] = {"loss_scale": 64.0, "unskipped": 3}
    target.optimizer.load_state_dict(saved, loss_index=1)
    assert target.optimizer.loss_scale == 64.0
    before = target.everything()
    with pytest.raises(ValueError, match="of apex.amp must hold a loss_scaler2 in amp"):
        target.optimizer.load_state_dict(saved, loss_index=2)
    assert_same(target.everything(), before)


def test_a_scale_above_the_present_ceiling_is_still_the_scale() -> None:
    target, saved = Target(ENTRIES[AMP]), read(AMP)
    target.optimizer.loss_scaler.max_scale = 1024.0
    target.optimizer.load_state_dict(saved)
    assert target.optimizer.loss_scale == 2048.0


@pytest.mark.parametrize("name", ["fairseq_sgd_per_tensor.pt", "apex_amp_o2_adam.pt"])
def test_masters_that_a_file_lacks_are_the_weights_and_no_more(name: str) -> None:
    # What the receiver's masters know beyond the weights is of another run.
    target, saved = Target(ENTRIES[name]), read(name)
    target.model.load_state_dict(saved["model"])
    with torch.no_grad():
        for master in target.optimizer.all_fp32_from_fp16_params:
            master += master * 2.0**-14  # less than the model can show
    saved = {key: value for key, value in saved.items() if key != "model"}
    target.optimizer.load_state_dict(saved)
    assert_same(target.masters(), named(ENTRIES[name]["masters"]))


def test_options_that_an_old_file_lacks_stay() -> None:
    target = Target(ENTRIES["megatron_old_pickle_adam.pt"])
    for group in target.optimizer.param_groups:
        group.update(fused=True, maximize=True, amsgrad=True)
    target.optimizer.load_state_dict(read("megatron_old_pickle_adam.pt"))
    for group in target.optimizer.param_groups:
        kept = (group["fused"], group["maximize"], group["amsgrad"])
        assert kept == (True, True, False)


# Forms of other writers.


def test_a_step_of_a_group_is_given_to_its_parameters() -> None:
    # As the fused Adam of apex and DeepSpeed keeps it.
    def make() -> FP16_Optimizer:
        inner = torch.optim.AdamW([half(1.0, 2.0), single(3.0)], lr=0.25)
        return FP16_Optimizer(inner, verbose=False)

    optimizer = make()
    for _ in range(3):
        parameters = [*optimizer.all_fp16_params, *optimizer.all_fp32_from_fp32_params]
        train(optimizer, sum(p.float().sum() for p in parameters))
    want = copy_of(optimizer.optimizer.state_dict())
    given = copy_of(want)
    for entry in given["state"].values():
        del entry["step"]
    given["param_groups"][0]["step"] = 3
    other = make()
    other.load_state_dict(given)
    assert_same(other.optimizer.state_dict(), want)


def test_flat_masters_of_native_parameters_become_their_values() -> None:
    entry = copy.deepcopy(ENTRIES["deepspeed_fused_adam.pt"])
    for said in entry["model"]["parameters"]:
        if said["name"].startswith("norm"):
            said["dtype"] = "float32"
    target, saved = Target(entry), read("deepspeed_fused_adam.pt")
    target.model.load_state_dict(saved["model"])
    target.optimizer.load_state_dict(saved["optimizer"])
    want = named(entry["masters"])
    got = target.masters()
    got |= {
        name: p.detach()
        for name, p in target.model.named_parameters()
        if name.startswith("norm")
    }
    assert_same(got, want)


def test_masters_of_parameters_that_are_frozen_now_are_restored() -> None:
    name = "megatron_v1_adam_hysteresis.pt"
    entry = copy.deepcopy(ENTRIES[name])
    [bias] = [p for p in entry["model"]["parameters"] if p["name"] == "linear.bias"]
    bias["requires_grad"] = False
    target = Target(entry)
    assert len(masters(target.optimizer)) == 1
    target.optimizer.load_state_dict(read(name)["optimizer"])
    assert_same(target.masters(), named(entry["masters"]))


def test_weights_of_a_data_parallel_model_are_found() -> None:
    name = "torch_fp32_adamw.pt"
    target, saved = Target(ENTRIES[name]), read(name)
    saved["model"] = {f"module.{key}": value for key, value in saved["model"].items()}
    target.optimizer.load_state_dict(saved, model=target.model)
    assert_same(target.masters(), named(ENTRIES[name]["masters"]))


def test_our_own_state_dict_may_be_in_a_whole_checkpoint() -> None:
    straight = load("apex_fp16_utils_adam.pt")
    saved = {
        "model": straight.model.state_dict(),
        "optimizer": copy_of(straight.optimizer.state_dict()),
    }
    other = Target(ENTRIES["apex_fp16_utils_adam.pt"])
    other.model.load_state_dict(saved["model"])
    other.optimizer.load_state_dict(saved)
    assert_same(other.everything(), straight.everything())


# What does not fit.


def put(state: Any, path: tuple[Any, ...], value: Any) -> None:
    """Set a value at a path of keys; `...` removes what is there."""
    *way, last = path
    for key in way:
        state = state[key]
    if value is ...:
        del state[last]
    else:
        state[last] = value


INNER = ("optimizer", "optimizer_state_dict")
BAD: list[tuple[str, tuple[Any, ...], Any, str]] = [
    (APEX, ("optimizer", "fp32_from_fp16"), ..., "of apex.* without fp32_from_fp16$"),
    (APEX, INNER, ..., "of apex.* without optimizer_state_dict$"),
    (APEX, (*INNER, "state"), ..., "must hold state and param_groups"),
    (APEX, (*INNER, "param_groups", 1), ..., r"groups of \[2, 2\].* but got \[2\]$"),
    (APEX, (*INNER, "param_groups", 0, "lr"), ..., "like Adam.* without lr in group 0"),
    (APEX, (*INNER, "param_groups", 0, "params"), [0], r"but got \[1, 2\]$"),
    (APEX, (*INNER, "state", 0, "exp_avg"), torch.ones(3, 5), r"exp_avg of shape"),
    (APEX, (*INNER, "state", 0, "exp_avg"), torch.ones(5, 3).int(), r"torch.int32"),
    (APEX, (*INNER, "state", 0, "exp_avg"), [1.0], "but got list$"),
    (APEX, (*INNER, "state", 0, "step"), "5", "must hold a number as step"),
    (APEX, (*INNER, "state", 0), 3, "must hold a dict as state of group 0, index 0"),
    (APEX, ("optimizer", "overflow"), 1, "must hold a bool as overflow, but got int$"),
    (APEX, ("optimizer", "fp32_from_fp16", 0), ..., "must have groups of .* masters"),
    (APEX, ("optimizer", "fp32_from_fp16", 0), [], r"\[1, 1\] masters, but got \[0, 1"),
    (APEX, ("optimizer", "fp32_from_fp16", 0), 3, "must hold lists of masters"),
    (APEX, ("optimizer", "fp32_from_fp16", 0, 0), torch.ones(1), r"of shape \[1\]$"),
    (APEX, ("optimizer", "loss_scaler"), 3, "must hold a loss scaler, but got 3$"),
    (APEX, ("optimizer",), {"x": 1}, "of a training run must hold .* with x$"),
    (CORE, ("optimizer", "optimizer"), ..., "of Megatron-Core .* without optimizer$"),
    (CORE, ("optimizer", "grad_scaler"), 3, "must hold a dict as grad_scaler"),
    (CORE, ("optimizer", "grad_scaler", "scale"), ..., "without scale$"),
    (CORE, ("optimizer", "grad_scaler", "scale"), -1.0, "valid loss scaler, but got"),
    (CORE, ("optimizer", "grad_scaler", "growth_tracker"), -1, "at least 0 as clean"),
    (CORE, ("optimizer", "grad_scaler", "hysteresis_tracker"), 0.5, "but got 0.5$"),
    (CORE, ("optimizer", "fp32_from_fp16_params", 0, 0), torch.ones(3, 5), "3, 5"),
    (FUSED, ("optimizer", "fp32_groups_flat", 0), torch.ones(19), r"got \[19\]$"),
    (FUSED, ("optimizer", "fp32_groups_flat", 0), torch.ones(4, 5), r"got \[4, 5\]$"),
    (FUSED, ("optimizer", "fp32_groups_flat", 0), 3, "flat master of 20 .* but got 3$"),
    (FUSED, ("optimizer", "fp32_groups_flat", 0), torch.ones(20).int(), "int32"),
    (FUSED, ("optimizer", "fp32_groups_flat", 0), ..., "2 groups of masters"),
    (FUSED, (*INNER, "state", 0, "exp_avg"), torch.ones(21), r"exp_avg .* got \[21\]$"),
    (FUSED, (*INNER, "state", 0), 3, "must hold a dict as state of group 0"),
    (FUSED, (*INNER, "param_groups", 1), ..., "must have 2 groups, but got 1$"),
    (FUSED, (*INNER, "param_groups", 0, "params"), [0, 1], "one flat parameter"),
    (FUSED, ("optimizer", "cur_iter"), ..., "of DeepSpeed .* without cur_iter$"),
    (FUSED, ("optimizer", "cur_iter"), -1, "at least 0 as cur_iter"),
    (FUSED, ("optimizer", "last_overflow_iter"), 7, "below cur_iter 7, but got 7$"),
    (FUSED, ("optimizer", "last_overflow_iter"), ..., "without last_overflow_iter$"),
    (FUSED, ("optimizer", "scale_factor"), 1.0, "valid loss scaler"),
    (FUSED, ("optimizer", "scale_window"), None, "valid loss scaler"),
    (UNFUSED, ("optimizer", "fp32_groups", 0), [], r"\[2, 2\] masters, but got \[0"),
    (UNFUSED, ("optimizer", "fp32_groups", 0), torch.ones(2), "lists of masters"),
    (UNFUSED, ("optimizer", "cur_scale"), math.inf, "valid loss scaler"),
    (FLAT, ("optimizer", "loss_scale"), "1", "of fairseq must hold a valid loss"),
    (FLAT, ("optimizer", "state", 0, "exp_avg"), torch.ones(29), r"got \[29\]$"),
    (FLAT, ("optimizer", "param_groups"), 3, "of fairseq must hold state and param"),
    (FLAT, ("model", "linear.bias"), torch.ones(4), r"of shape \[4\]$"),
    (AMP, ("amp", "loss_scaler0"), ..., "of apex.amp must hold a loss_scaler0"),
    (AMP, ("amp",), 3, "of apex.amp must hold a loss_scaler0 in amp, but got 3$"),
    (AMP, ("amp", "loss_scaler0", "unskipped"), ..., "without unskipped$"),
    (TORCH, ("scaler", "_growth_tracker"), ..., "of torch.amp.GradScaler .* without"),
    (TORCH, ("scaler", "backoff_factor"), 2.0, "valid loss scaler, but got .*backoff"),
    (TORCH, ("model", "linear.weight"), torch.ones(5, 3).int(), "torch.int32"),
    (TORCH, ("optimizer", "param_groups"), ..., "of a training run must hold"),
]


@pytest.mark.parametrize(
    "name, path, value, message",
    BAD,
    ids=[
        f"{n.partition('.')[0]}-{'.'.join(map(str, p))}-{i}"
        for i, (n, p, _, _) in enumerate(BAD)
    ],
)
def test_what_does_not_fit_is_refused_and_changes_nothing(
    name: str, path: tuple[Any, ...], value: Any, message: str
) -> None:
    target, saved = Target(ENTRIES[name]), copy_of(read(name))
    target.optimizer.load_state_dict(copy_of(saved), model=target.model)
    target.step(named(ENTRIES[name]["next_step"]["gradients"]))
    before = target.everything()
    scaler, report = target.optimizer.loss_scaler, target.optimizer.load_report
    put(saved, path, value)
    with pytest.raises(
        ValueError,
        match=f"^FP16_Optimizer.load_state_dict: the state dict .*{message}",
    ):
        target.optimizer.load_state_dict(saved, model=target.model)
    assert_same(target.everything(), before)
    assert target.optimizer.loss_scaler is scaler
    assert target.optimizer.load_report is report


@every_file
def test_a_model_of_another_shape_is_refused(name: str) -> None:
    entry = copy.deepcopy(ENTRIES[name])
    entry["model"]["linear"], entry["model"]["norm"] = [4, 6], [6]
    target = Target(entry)
    before = target.everything()
    with pytest.raises(ValueError, match="^FP16_Optimizer.load_state_dict: the state"):
        target.optimizer.load_state_dict(read(name), model=target.model)
    assert_same(target.everything(), before)


@every_file
def test_another_inner_optimizer_is_refused(name: str) -> None:
    entry = copy.deepcopy(ENTRIES[name])
    inner = entry["inner_optimizer"]
    is_sgd = inner["class"].endswith("SGD")
    inner["class"] = "torch.optim.Adam" if is_sgd else "torch.optim.SGD"
    target = Target(entry)
    before = target.everything()
    with pytest.raises(ValueError, match="of an optimizer like .* without"):
        target.optimizer.load_state_dict(read(name))
    assert_same(target.everything(), before)


def test_an_inner_loader_that_fails_leaves_everything_as_it_was() -> None:
    name = FUSED
    target = Target(ENTRIES[name])

    def load_state_dict(state: Any) -> None:
        type(inner).load_state_dict(inner, state)
        raise OSError("half-way")

    inner = target.optimizer.optimizer
    inner.load_state_dict = load_state_dict
    before = target.everything()
    scaler = target.optimizer.loss_scaler
    with pytest.raises(OSError, match="half-way"):
        target.optimizer.load_state_dict(read(name), model=target.model)
    assert_same(target.everything(), before)
    assert target.optimizer.loss_scaler is scaler
    assert len(masters(target.optimizer)) == 4


class Projecting(torch.optim.SGD):
    """Keeps moments in a shape of its own, and more than torch at the top."""

    def state_dict(self) -> dict[str, Any]:
        return {**super().state_dict(), "rank": 1}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        assert state["rank"] == 1
        super().load_state_dict({k: v for k, v in state.items() if k != "rank"})


def test_state_of_an_optimizer_that_is_not_known_may_have_any_form() -> None:
    param = half(1.0, 2.0)
    optimizer = FP16_Optimizer(Projecting([param], lr=0.5), verbose=False)
    [master] = masters(optimizer)
    optimizer.state[master] = {"exp_avg": torch.ones(1), "step": [1, 2]}
    state = seed_dict(optimizer, LossScaler(8.0))
    optimizer.load_state_dict(optimizer.state_dict())
    optimizer.load_state_dict(state)
    assert_same(optimizer.state[master], {"exp_avg": torch.ones(1), "step": [1, 2]})
    assert optimizer.loss_scale == 8.0
