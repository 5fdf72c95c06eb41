"""Modules in half precision and master weights by hand, under their old names."""

import dataclasses
from collections import OrderedDict, defaultdict, namedtuple
from typing import Any

import pytest
import torch

from fp16core import fp16_utils
from helpers import HALF_DTYPES, INF

Point = namedtuple("Point", "x y")


@dataclasses.dataclass
class Output:
    logits: Any
    loss: Any = None


def net() -> torch.nn.Sequential:
    torch.manual_seed(0)
    return torch.nn.Sequential(
        torch.nn.Linear(4, 3),
        torch.nn.BatchNorm1d(3),
        torch.nn.BatchNorm1d(3, affine=False),
        torch.nn.Linear(3, 2),
    )


def dtypes(module: torch.nn.Module) -> list[torch.dtype]:
    return [v.dtype for v in module.state_dict().values() if v.is_floating_point()]


F32, F16 = torch.float32, torch.float16

# Modules.


def test_network_to_half_keeps_affine_batch_norm_in_float32() -> None:
    model = fp16_utils.network_to_half(net())
    kinds = {k: v.dtype for k, v in model.state_dict().items()}
    assert kinds["1.0.weight"] == kinds["1.3.bias"] == F16
    assert kinds["1.1.weight"] == kinds["1.1.running_mean"] == F32
    assert kinds["1.2.running_mean"] == F16
    assert kinds["1.1.num_batches_tracked"] == torch.int64
    assert fp16_utils.tofp16()(torch.ones(2)).dtype == F16


def test_convert_network_keeps_the_parameters_the_objects_they_are() -> None:
    model = net()
    params = list(model.parameters())
    model[0].weight.grad = torch.ones(3, 4)
    assert fp16_utils.convert_network(model, torch.bfloat16) is model
    assert all(a is b for a, b in zip(params, model.parameters(), strict=True))
    assert model[0].weight.grad.dtype == torch.bfloat16
    assert dtypes(model[1]) == [F32] * 4
    assert dtypes(model[2]) == [torch.bfloat16] * 2


def test_convert_module_leaves_children_and_integers() -> None:
    class Parent(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = torch.nn.Parameter(torch.ones(2))
            self.child = torch.nn.Linear(1, 1)
            self.register_buffer("count", torch.zeros(2, dtype=torch.long))

    parent = Parent()
    fp16_utils.convert_module(parent, F16)
    assert parent.weight.dtype == F16
    assert dtypes(parent.child) == [F32, F32]
    assert parent.count.dtype == torch.long


def test_recurrent_layers_are_converted_and_run() -> None:
    lstm = fp16_utils.convert_network(torch.nn.LSTM(3, 2), torch.bfloat16)
    out, _ = lstm(torch.ones(4, 1, 3, dtype=torch.bfloat16))
    assert out.dtype == torch.bfloat16


class Echo(torch.nn.Module):
    """Returns what it gets."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(2))

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return args, kwargs


def test_a_half_model_gets_half_arguments() -> None:
    model = fp16_utils.FP16Model(Echo())
    assert dtypes(model.network) == [F16]
    double, ids = torch.ones(1).double(), torch.ones(1, dtype=torch.long)
    (args, kwargs) = model({"a": [double]}, ids, mask=torch.ones(1))
    assert args[0]["a"][0].dtype == kwargs["mask"].dtype == F16
    assert args[1].dtype == torch.long


def test_a_half_module_converts_on_both_sides_and_keeps_the_keys() -> None:
    model = fp16_utils.FP16_Module(Echo())
    seen: list[Any] = []
    model.module.register_forward_pre_hook(
        lambda _, args, kwargs: seen.extend([args, kwargs]), with_kwargs=True
    )
    args, kwargs = model((torch.ones(1), 3), mask={"m": torch.ones(1)})
    assert seen[0][0][0].dtype == seen[1]["mask"]["m"].dtype == F16
    assert args[0][0].dtype == kwargs["mask"]["m"].dtype == F32
    assert args[0][1] == 3
    assert list(model.state_dict()) == ["weight"]
    assert [n for n, _ in model.named_parameters()] == ["module.weight"]
    result = model.load_state_dict({"weight": torch.full((2,), 4.0)})
    assert result.missing_keys == []
    assert model.module.weight.tolist() == [4.0, 4.0]
    with pytest.raises(RuntimeError, match="Missing key"):
        model.load_state_dict({})
    assert model.load_state_dict({}, strict=False).missing_keys == ["weight"]


def test_conversions_enter_every_container() -> None:
    half = torch.ones(1).half()
    value = OrderedDict(
        p=Point(torch.ones(1), [torch.ones(1).double(), "text"]),
        o=Output(logits=(half,), loss=torch.ones(1)),
        n=None,
    )
    low = fp16_utils.fp32_to_fp16(value)
    assert isinstance(low, OrderedDict)
    assert isinstance(low["p"], Point)
    assert low["p"].x.dtype == F16
    assert low["p"].y[0].dtype == torch.double
    assert low["p"].y[1] == "text"
    assert low["n"] is None
    assert low["o"].loss.dtype == F16
    assert low["o"].logits[0] is half
    assert value["p"].x.dtype == F32, "the original stays"
    assert fp16_utils.fp16_to_fp32(low)["o"].logits[0].dtype == F32


# Lists.


@pytest.mark.parametrize("dtype", [*HALF_DTYPES, torch.float32])
@pytest.mark.parametrize("flat", [False, True])
def test_masters_by_hand_train_like_fp32_weights(
    dtype: torch.dtype, flat: bool
) -> None:
    torch.manual_seed(1)
    model = torch.nn.Linear(3, 2).to(dtype)
    model.bias.requires_grad_(False)
    model.register_parameter("scale", torch.nn.Parameter(torch.ones(2, dtype=dtype)))
    params, masters = fp16_utils.prep_param_lists(model, flat_master=flat)
    assert [id(p) for p in params] == [id(model.weight), id(model.scale)]
    assert all(m.is_leaf and m.requires_grad and m.dtype == F32 for m in masters)
    oracle = [p.detach().float().clone() for p in params]
    if flat:
        assert masters[0].shape == (8,)
    optimizer = torch.optim.SGD(masters, lr=0.25)
    for step in range(3):
        grads = [torch.randn(p.shape).to(dtype) for p in params]
        for param, grad in zip(params, grads, strict=True):
            param.grad = grad
        fp16_utils.model_grads_to_master_grads(params, masters, flat_master=flat)
        optimizer.step()
        fp16_utils.master_params_to_model_params(params, masters, flat_master=flat)
        oracle = [w - 0.25 * g.float() for w, g in zip(oracle, grads, strict=True)]
        for param, weight in zip(params, oracle, strict=True):
            assert torch.equal(param.detach(), weight.to(dtype)), step
    assert torch.equal(
        torch.cat([m.detach().flatten() for m in masters]),
        torch.cat([w.flatten() for w in oracle]),
    )


def test_a_parameter_without_a_gradient_gives_its_master_none() -> None:
    params = [torch.nn.Parameter(torch.ones(2).half()) for _ in range(2)]
    masters = [torch.ones(2, requires_grad=True) for _ in range(2)]
    masters[0].grad = torch.ones(2)
    params[1].grad = torch.full((2,), 3.0).half()
    fp16_utils.model_grads_to_master_grads(params, masters)
    assert masters[0].grad is None
    assert masters[1].grad is not None
    assert masters[1].grad.tolist() == [3.0, 3.0]
    flat = torch.ones(4, requires_grad=True)
    flat.grad = torch.ones(4)
    fp16_utils.model_grads_to_master_grads(params, [flat], flat_master=True)
    assert flat.grad.tolist() == [0.0, 0.0, 3.0, 3.0]


def test_lists_that_do_not_fit_are_refused() -> None:
    params = [torch.nn.Parameter(torch.ones(2).half())]
    params[0].grad = torch.ones(2).half()
    for function in (
        fp16_utils.model_grads_to_master_grads,
        fp16_utils.master_params_to_model_params,
    ):
        with pytest.raises(ValueError, match=r"shapes of model_params, \[\[2\]\], but"):
            function(params, [torch.ones(1)])
        with pytest.raises(ValueError, match="one flat master of 2 elements, but got"):
            function(params, [torch.ones(3)], flat_master=True)
    assert params[0].tolist() == [1.0, 1.0]


def test_small_helpers() -> None:
    assert fp16_utils.to_python_float(torch.tensor([2.0])) == 2.0
    assert fp16_utils.to_python_float([3.0, 4.0]) == 3.0
    with pytest.raises(RuntimeError):
        fp16_utils.to_python_float(torch.ones(2))
    with pytest.raises(RuntimeError, match="no backward pass .* shape \\[1\\]"):
        fp16_utils.backwards_debug_hook(torch.ones(1))


def test_clip_grad_norm_clips_like_torch() -> None:
    params = [torch.zeros(2, requires_grad=True) for _ in range(3)]
    for param, values in zip(params, ([3.0, 0.0], [0.0, 4.0]), strict=False):
        param.grad = torch.tensor(values)
    twins = [p.detach().clone().requires_grad_() for p in params]
    for param, twin in zip(params, twins, strict=True):
        twin.grad = None if param.grad is None else param.grad.clone()
    norm = fp16_utils.clip_grad_norm(params, 1.0)
    torch.nn.utils.clip_grad_norm_(twins, 1.0)
    assert norm.item() == 5.0
    for param, twin in zip(params, twins, strict=True):
        assert (param.grad is None) == (twin.grad is None)
        if param.grad is not None:
            # The same coefficient, in float64 and in float32.
            torch.testing.assert_close(param.grad, twin.grad, rtol=2e-7, atol=0)
    assert fp16_utils.clip_grad_norm(params[0], 100.0, INF).item() == pytest.approx(0.6)


def test_a_half_module_loads_as_a_part_of_another() -> None:
    # The keys of its state dict lack its child's name, which torch looks for.
    model = torch.nn.Sequential(fp16_utils.FP16_Module(net()), torch.nn.ReLU())
    state = {key: value.clone() for key, value in model.state_dict().items()}
    assert "0.0.weight" in state
    with torch.no_grad():
        model[0].module[0].weight.zero_()
    assert model.load_state_dict(state).unexpected_keys == []
    assert torch.equal(model[0].module[0].weight, state["0.0.weight"])
    del state["0.0.weight"]
    with pytest.raises(RuntimeError, match="Missing key"):
        model.load_state_dict(state)


def test_conversions_keep_what_a_dict_has_beside_its_items() -> None:
    given = defaultdict(list, x=torch.ones(1))
    made = fp16_utils.fp32_to_fp16(given)
    assert made["x"].dtype == F16 and made["new"] == []
    assert given["x"].dtype == F32 and list(given) == ["x"]


def embedding(sparse: bool = True) -> torch.nn.Embedding:
    return torch.nn.Embedding(4, 2, sparse=sparse).half()


def test_a_sparse_gradient_stays_sparse() -> None:
    model = embedding()
    params, masters = fp16_utils.prep_param_lists(model)
    model(torch.tensor([1, 1, 3])).float().sum().backward()
    fp16_utils.model_grads_to_master_grads(params, masters)
    grad = masters[0].grad
    assert grad is not None and grad.is_sparse and grad.dtype == F32
    assert grad.to_dense()[:, 0].tolist() == [0.0, 2.0, 0.0, 1.0]
    # Dense again, as after a change of the layer.
    params[0].grad = torch.ones(4, 2, dtype=F16)
    fp16_utils.model_grads_to_master_grads(params, masters)
    assert masters[0].grad is not None
    assert torch.equal(masters[0].grad, torch.ones(4, 2))


def test_a_gradient_that_cannot_be_copied_changes_no_master() -> None:
    model = embedding()
    model(torch.tensor([1])).float().sum().backward()
    params, masters = fp16_utils.prep_param_lists(model, flat_master=True)
    wanted = torch.ones(8)
    masters[0].grad = wanted.clone()
    with pytest.raises(TypeError, match="must be strided, but got Sparse"):
        fp16_utils.model_grads_to_master_grads(params, masters, flat_master=True)
    assert torch.equal(masters[0].grad, wanted)
