"""The code of the migration pages runs as it stands."""

import pathlib
import re
from typing import Any

import pytest
import torch

from fp16core import FP16_Optimizer
from helpers import assert_same, copy_of

PAGES = pathlib.Path(__file__).parents[1] / "docs" / "migrating"


def code_after(page: str) -> list[str]:
    """Return the blocks of Python from "After" on."""
    text = (PAGES / page).read_text()
    return re.findall(
        r"```python\n(.*?)```", text.partition("\n## After\n")[2], re.DOTALL
    )


@pytest.fixture
def names(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """What the code of a page finds, in a folder of its own."""
    monkeypatch.chdir(tmp_path)
    return {
        "net": torch.nn.Linear(3, 2),
        "data": [(torch.randn(4, 3), torch.randn(4, 2)) for _ in range(20)],
        "criterion": torch.nn.functional.mse_loss,
    }


def trained_in_fp32(names: dict[str, Any]) -> tuple[Any, Any]:
    net = torch.nn.Linear(3, 2)
    inner = torch.optim.AdamW(net.parameters(), lr=0.25)
    for x, y in names["data"][:3]:
        inner.zero_grad()
        names["criterion"](net(x), y).backward()
        inner.step()
    return net, inner


def test_from_grad_scaler(names: dict[str, Any]) -> None:
    train, load, save = code_after("gradscaler.md")
    exec(train, names)
    assert names["optimizer"].steps_applied > 0
    net, inner = trained_in_fp32(names)
    scaler = {
        "scale": 512.0,
        "growth_factor": 2.0,
        "backoff_factor": 0.5,
        "growth_interval": 7,
        "_growth_tracker": 3,
    }
    checkpoint = {
        "model": net.state_dict(),
        "optimizer": inner.state_dict(),
        "scaler": scaler,
    }
    torch.save(checkpoint, "run.pt")
    exec(load, names)
    exec(save, names)
    again = torch.load("run.pt")
    assert_same(dict(again["model"]), dict(checkpoint["model"]))
    assert again["scaler"] == scaler
    assert_same(again["optimizer"]["state"], checkpoint["optimizer"]["state"])


def test_from_deepspeed(names: dict[str, Any]) -> None:
    train, load = code_after("deepspeed.md")
    exec(train, names)
    assert names["optimizer"].steps_applied > 0
    net, inner = trained_in_fp32(names)
    flat = torch.nn.utils.parameters_to_vector(net.parameters()).detach()
    states = list(inner.state_dict()["state"].values())
    joined = {
        key: torch.cat([state[key].flatten() for state in states])
        for key in ("exp_avg", "exp_avg_sq")
    }
    [group] = inner.state_dict()["param_groups"]
    saved = {
        "module": net.half().state_dict(),
        "optimizer": {
            "dynamic_loss_scale": True,
            "cur_scale": 64.0,
            "cur_iter": 9,
            "last_overflow_iter": 4,
            "scale_factor": 2.0,
            "scale_window": 5,
            "optimizer_state_dict": {
                "state": {0: {"step": torch.tensor(3.0), **joined}},
                "param_groups": [{**group, "params": [0]}],
            },
            "fp32_groups_flat": [flat],
            "clip_grad": 1.0,
        },
    }
    torch.save(saved, "mp_rank_00_model_states.pt")
    exec(load, names)
    optimizer: FP16_Optimizer = names["optimizer"]
    got = torch.nn.utils.parameters_to_vector(optimizer.all_fp32_from_fp16_params)
    assert_same(got.detach(), flat)
    assert optimizer.loss_scale == 64.0
    assert optimizer.param_groups[0]["lr"] == 0.25


@pytest.mark.parametrize(
    ("page", "file"), [("apex.md", "old.pt"), ("megatron.md", "model_optim_rng.pt")]
)
def test_from_where_the_class_is_the_same(
    names: dict[str, Any], page: str, file: str
) -> None:
    train, load = code_after(page)
    names["data"] *= 2
    exec(train, names)
    model, optimizer = names["model"], names["optimizer"]
    assert optimizer.steps_applied > 0
    saved = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
    torch.save(saved, file)
    masters = [m.detach().clone() for m in optimizer.all_fp32_from_fp16_params]
    scale = optimizer.loss_scale
    exec(train, names)
    exec(load, names)
    assert_same(
        [m.detach() for m in names["optimizer"].all_fp32_from_fp16_params], masters
    )
    assert names["optimizer"].loss_scale == scale


@pytest.mark.parametrize(
    "page, file", [("apex.md", "old.pt"), ("megatron.md", "model_optim_rng.pt")]
)
def test_from_the_originals(names: dict[str, Any], page: str, file: str) -> None:
    train, load = code_after(page)
    exec(train, names)
    model, optimizer = names["model"], names["optimizer"]
    assert optimizer.steps_applied > 0
    # A scale that overflows no more, so that the next step moves the weights.
    optimizer.loss_scale = 64.0
    saved = copy_of({"model": model.state_dict(), "optimizer": optimizer.state_dict()})
    torch.save(saved, file)
    optimizer.zero_grad()
    optimizer.backward(names["loss"].detach() + model(names["x"]).float().sum())
    optimizer.step()
    assert not optimizer.overflow
    wanted = saved["optimizer"]["fp32_from_fp16"][0]
    moved = optimizer.fp32_from_fp16_groups[0]
    assert not all(map(torch.equal, moved, wanted))
    exec(load, names)
    assert_same(
        [m.detach() for m in optimizer.fp32_from_fp16_groups[0]],
        [m.detach() for m in wanted],
    )
    assert optimizer.loss_scale == 64.0
