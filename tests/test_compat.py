"""Old module names, and scripts that are run with them."""

import importlib
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import fp16core
from fp16core import compat, fp16_utils, multi_tensor
from fp16core.compat.__main__ import main
from helpers import half, train

ORIGINAL_NAMES = {"apex", "amp_C", "fp16", "megatron", "mpu"}


def forget() -> None:
    for name in [n for n in sys.modules if n.partition(".")[0] in ORIGINAL_NAMES]:
        del sys.modules[name]


@pytest.fixture(autouse=True)
def clean() -> Iterator[None]:
    yield
    compat.uninstall()
    forget()


def load(name: str) -> Any:
    return importlib.import_module(name)


def test_apex_is_there_with_all_its_names() -> None:
    with pytest.raises(ImportError):
        load("apex.fp16_utils")
    compat.install("apex")
    apex = load("apex.fp16_utils")
    for name in (
        "FP16_Optimizer LossScaler DynamicLossScaler BN_convert_float network_to_half "
        "prep_param_lists model_grads_to_master_grads master_params_to_model_params "
        "tofp16 to_python_float clip_grad_norm convert_module convert_network FP16Model"
    ).split():
        assert hasattr(apex, name), name
    assert apex.network_to_half is fp16_utils.network_to_half
    assert load("apex.fp16_utils.loss_scaler").LossScaler is fp16core.LossScaler
    assert issubclass(
        load("apex.fp16_utils.fp16_optimizer").FP16_Optimizer, fp16core.FP16_Optimizer
    )
    applier = load("apex.multi_tensor_apply").multi_tensor_applier
    assert applier is multi_tensor.multi_tensor_applier
    assert load("amp_C").multi_tensor_scale is multi_tensor.multi_tensor_scale
    with pytest.raises(ImportError):
        load("fp16")
    with pytest.raises(ImportError):
        load("apex.amp")


def test_megatron_is_there_with_all_its_names() -> None:
    compat.install("megatron")
    for root in ("fp16", "megatron.fp16"):
        package = load(root)
        for name in (
            "FP16_Optimizer FP16_Module fp32_to_fp16 fp16_to_fp32 conversion_helper "
            "FLOAT_TYPES HALF_TYPES LossScaler DynamicLossScaler network_to_half "
            "clip_grad_norm prep_param_lists FP16Model"
        ).split():
            assert hasattr(package, name), name
        scalers = load(f"{root}.loss_scaler")
        assert scalers.DynamicLossScaler(delayed_shift=2).loss_scale == 2.0**32
        assert load(f"{root}.fp16").FP16_Module is fp16_utils.FP16_Module
        assert load(f"{root}.fp16util").tofp16 is fp16_utils.tofp16
    assert "fp16.loss_scaler" in compat.provided()


def test_installing_twice_and_undoing_leave_no_trace() -> None:
    path = list(sys.meta_path)
    compat.install("apex")
    compat.install("apex")
    assert len(sys.meta_path) == len(path) + 1
    load("apex.fp16_utils")
    compat.uninstall()
    assert sys.meta_path == path
    assert compat.provided() == []
    with pytest.raises(ImportError):
        load("apex")


def test_another_family_is_refused() -> None:
    with pytest.raises(
        ValueError, match="family must be one of apex, megatron, but got 'fairseq'"
    ):
        compat.install("fairseq")


def write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(textwrap.dedent(text))


@pytest.mark.parametrize("early", [False, True])
def test_a_real_apex_is_never_shadowed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, early: bool
) -> None:
    # As apex is today: its own amp_C and multi_tensor_apply, and no fp16_utils.
    write(tmp_path / "apex" / "__init__.py", "real = True\n")
    write(tmp_path / "apex" / "multi_tensor_apply.py", "multi_tensor_applier = 1\n")
    write(tmp_path / "amp_C.py", "real = True\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    if early:
        load("apex")
    compat.install("apex")
    assert load("apex").real
    assert load("amp_C").real
    assert load("apex.multi_tensor_apply").multi_tensor_applier == 1
    assert load("apex.fp16_utils").FP16_Optimizer is not None
    assert compat.provided() == ["apex.fp16_utils"]
    compat.uninstall()
    assert "apex" in sys.modules


def test_flavours_have_the_defaults_of_their_family(
    capsys: pytest.CaptureFixture[str],
) -> None:
    compat.install("apex")
    compat.install("megatron")
    load("fp16").FP16_Optimizer(torch.optim.SGD([half(1.0)], lr=0.1))
    assert capsys.readouterr().out == ""
    apex = load("apex.fp16_utils").FP16_Optimizer
    optimizer = apex(torch.optim.SGD([half(1.0)], lr=0.1))
    assert "1 half parameters" in capsys.readouterr().out
    assert type(optimizer).__name__ == "FP16_Optimizer"
    optimizer = apex(
        torch.optim.SGD([half(1.0)], lr=0.1),
        dynamic_loss_scale=True,
        dynamic_loss_args={"scale_factor": 4, "max_loss_scale": 2.0**10},
        verbose=False,
    )
    assert optimizer.loss_scale == 2.0**10
    assert optimizer.loss_scaler.scale_factor == 2.0


def test_scripts_run_as_they_are(tmp_path: Path) -> None:
    write(
        tmp_path / "train.py",
        """
        import sys
        import torch
        import amp_C
        import helper
        from apex.fp16_utils import FP16_Optimizer
        from fp16.loss_scaler import DynamicLossScaler

        w = torch.nn.Parameter(torch.ones(1).half())
        optimizer = FP16_Optimizer(torch.optim.SGD([w], lr=0.5), verbose=False)
        optimizer.backward(w.float().sum())
        optimizer.step()
        print(__name__, sys.argv[1:], w.item(), helper.word)
        """,
    )
    write(tmp_path / "helper.py", "word = 'found'\n")
    command = [sys.executable, "-m", "fp16core.compat"]
    script = str(tmp_path / "train.py")
    run = subprocess.run(
        [*command, script, "--lr", "-x"], capture_output=True, text=True, check=False
    )
    assert run.stdout == "__main__ ['--lr', '-x'] 0.5 found\n", run.stderr
    run = subprocess.run(
        [*command, "-m", "train", "a"],
        capture_output=True,
        text=True,
        check=False,
        cwd=tmp_path,
    )
    assert run.stdout == "__main__ ['a'] 0.5 found\n", run.stderr


def test_without_a_script_the_usage_is_told() -> None:
    for arguments in ([], ["-m"], ["--lr"]):
        with pytest.raises(SystemExit, match=r"^usage: python -m fp16core.compat \(SC"):
            main(arguments)


def test_a_package_beside_the_script_wins(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(tmp_path / "fp16" / "__init__.py", "mine = True\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    compat.install("megatron")
    assert load("fp16").mine
    assert load("fp16.loss_scaler").LossScaler is fp16core.LossScaler


def test_megatron_scalers_are_of_its_own_class() -> None:
    compat.install("megatron")
    module = load("fp16")
    arguments = {"init_scale": 8, "delayed_shift": 3}
    made = [
        module.FP16_Optimizer(
            torch.optim.SGD([half(1.0)], lr=0.5), dynamic_loss_scale=True, **options
        )
        for options in ({"dynamic_loss_args": arguments}, {})
    ]
    made[0].loss_scaler.update_scale(True)
    made[1].load_state_dict(made[0].state_dict())
    for optimizer in made:
        assert type(optimizer.loss_scaler) is module.DynamicLossScaler
        assert optimizer.loss_scale == 8.0
        assert optimizer.loss_scaler.cur_hysteresis == 2
    policy = {"policy": "deepspeed", "min_scale": 4}
    optimizer = module.FP16_Optimizer(
        torch.optim.SGD([half(1.0)], lr=0.5), 1.0, True, policy
    )
    assert optimizer.loss_scaler.window_lag == 1


def test_megatron_without_mpu_is_one_process() -> None:
    compat.install("megatron")
    module = load("fp16")
    weight = half(1.0)
    weight.model_parallel = True
    optimizer = module.FP16_Optimizer(torch.optim.SGD([weight], lr=0.5))
    train(optimizer, weight.float().sum())
    assert weight.item() == 0.5
    assert optimizer.param_groups[0]["params"][0].model_parallel
    assert not module.DynamicLossScaler().has_overflow([weight])


def test_an_absent_name_is_an_import_error_that_says_whose_module_it_is() -> None:
    compat.install("apex")
    with pytest.raises(ImportError, match=r"'amp' from 'apex' \(.*fp16core.compat"):
        exec("from apex import amp")
    with pytest.raises(ImportError, match="No module named 'apex.optimizers'"):
        load("apex.optimizers")
    with pytest.raises(ImportError, match="'multi_tensor_adam' from 'amp_C'"):
        exec("from amp_C import multi_tensor_adam")
