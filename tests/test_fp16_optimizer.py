"""The members of FP16_Optimizer do what their names say, one after the other."""

import copy
import inspect
import re
from typing import Any

import pytest
import torch

from fp16core import DynamicLossScaler, FP16_Optimizer, LossScaler
from helpers import (
    HALF_DTYPES,
    INF,
    NAN,
    assert_same,
    copy_of,
    half,
    masters,
    single,
    train,
)

SGD = torch.optim.SGD


def wrap(*params: torch.Tensor, lr: float = 0.5, **kwargs: Any) -> FP16_Optimizer:
    """Wrap SGD, whose step is easily done by head: param -= lr * grad."""
    return FP16_Optimizer(SGD(list(params), lr=lr), verbose=False, **kwargs)


def wrap_dynamic(*params: torch.Tensor, **scaler: Any) -> FP16_Optimizer:
    return wrap(*params, dynamic_loss_scale=True, dynamic_loss_args=scaler)


def loss_of(*params: torch.Tensor, factor: float = 1.0) -> torch.Tensor:
    """Return a loss whose gradient is `factor` in every element."""
    return sum(((p.float() * factor).sum() for p in params), torch.zeros(()))


# Construction.


def test_signature_has_the_five_old_arguments_first() -> None:
    parameters = list(inspect.signature(FP16_Optimizer).parameters.values())
    assert [p.name for p in parameters[:5]] == [
        "init_optimizer",
        "static_loss_scale",
        "dynamic_loss_scale",
        "dynamic_loss_args",
        "verbose",
    ]
    assert [p.default for p in parameters[1:5]] == [1.0, False, None, True]
    assert all(p.kind is p.KEYWORD_ONLY for p in parameters[5:])


@pytest.mark.parametrize("dtype", HALF_DTYPES, ids=str)
def test_a_master_is_an_exact_fp32_leaf_in_the_place_of_the_parameter(
    dtype: torch.dtype,
) -> None:
    param = torch.nn.Parameter(torch.randn(3, 4).to(dtype).t())
    optimizer = wrap(param)
    [master] = optimizer.param_groups[0]["params"]
    assert master.dtype == torch.float32
    assert torch.equal(master, param.float())
    assert master.stride() == param.stride()
    assert master.is_leaf and master.requires_grad and master.grad is None
    assert master.data_ptr() != param.data_ptr()
    assert optimizer.fp16_groups[0][0] is param
    assert optimizer.fp32_from_fp16_groups[0][0] is master


def test_native_and_frozen_parameters_stay_where_they_are() -> None:
    native, double = single(1.0), half(1.0, dtype=torch.float64)
    frozen = torch.nn.Parameter(torch.ones(2).half(), requires_grad=False)
    frozen_integers = torch.nn.Parameter(torch.ones(2).int(), requires_grad=False)
    params = [native, frozen, half(1.0), double, frozen_integers]
    optimizer = wrap(*params)
    held = optimizer.param_groups[0]["params"]
    assert held[0] is native
    assert held[1] is frozen
    assert held[3] is double
    assert held[4] is frozen_integers
    assert [len(group) for group in optimizer.fp16_groups] == [1]
    assert optimizer.fp32_from_fp32_groups[0][0] is native
    assert optimizer.fp32_from_fp32_groups[0][1] is double


def test_the_three_lists_go_by_group_even_where_groups_are_empty_of_a_kind() -> None:
    inner = SGD([{"params": [half(1.0)]}, {"params": [single(1.0)]}], lr=0.1)
    optimizer = FP16_Optimizer(inner, verbose=False)
    assert [len(g) for g in optimizer.fp16_groups] == [1, 0]
    assert [len(g) for g in optimizer.fp32_from_fp16_groups] == [1, 0]
    assert [len(g) for g in optimizer.fp32_from_fp32_groups] == [0, 1]


def test_groups_dicts_and_lists_keep_their_identity_and_order() -> None:
    inner = SGD([{"params": [half(1.0)], "lr": 0.5}, {"params": [half(2.0)]}], lr=1.0)
    groups = inner.param_groups
    dicts = list(groups)
    lists = [group["params"] for group in groups]
    optimizer = FP16_Optimizer(inner, verbose=False)
    assert optimizer.optimizer is inner
    assert optimizer.param_groups is inner.param_groups is groups
    for now, group, params in zip(groups, dicts, lists, strict=True):
        assert now is group
        assert now["params"] is params
    assert [group["params"][0].item() for group in groups] == [1.0, 2.0]


@pytest.mark.parametrize("dtype", HALF_DTYPES, ids=str)
def test_state_from_before_moves_to_the_master_and_widens(dtype: torch.dtype) -> None:
    param = half(1.0, 2.0, dtype=dtype)
    inner = torch.optim.Adam([param], lr=0.25)
    (param.float() * torch.tensor([1.0, 3.0])).sum().backward()
    inner.step()
    before = copy_of(inner.state[param])
    optimizer = FP16_Optimizer(inner, verbose=False)
    [master] = masters(optimizer)
    assert list(inner.state) == [master]
    assert inner.state is optimizer.state
    assert_same(
        inner.state[master],
        {
            "step": before["step"],
            "exp_avg": before["exp_avg"].float(),
            "exp_avg_sq": before["exp_avg_sq"].float(),
        },
    )


def test_nested_state_is_widened_entry_by_entry() -> None:
    param = half(1.0)
    inner = SGD([param], lr=0.1)
    directions = [torch.ones(1).half(), torch.ones(1)]
    inner.state[param] = {
        "step": torch.tensor(3.0).half(),
        "directions": directions,
        "pair": (torch.ones(1).half(), 4),
        "more": {"inner": torch.ones(1).bfloat16(), "count": torch.tensor(2)},
    }
    FP16_Optimizer(inner, verbose=False)
    [state] = inner.state.values()
    assert state["directions"] is directions
    assert_same(
        state,
        {
            "step": torch.tensor(3.0).half(),
            "directions": [torch.ones(1), torch.ones(1)],
            "pair": (torch.ones(1), 4),
            "more": {"inner": torch.ones(1), "count": torch.tensor(2)},
        },
    )


def test_attributes_of_a_parameter_are_copied_to_its_master() -> None:
    param = half(1.0)
    param.model_parallel = True
    [master] = masters(wrap(param))
    assert master.model_parallel is True


@pytest.mark.parametrize(
    "thing", [None, object(), SGD, torch.nn.Linear(1, 1), [half(1.0)]]
)
def test_refuses_what_is_no_optimizer(thing: Any) -> None:
    with pytest.raises(
        TypeError, match="^FP16_Optimizer: init_optimizer must be an optimizer, but got"
    ):
        FP16_Optimizer(thing)


def test_refuses_an_optimizer_that_is_wrapped_already() -> None:
    optimizer = wrap(half(1.0))
    for again in (optimizer.optimizer, optimizer):
        with pytest.raises(
            ValueError,
            match="^FP16_Optimizer: init_optimizer must not be wrapped already, "
            "but got (SGD|FP16_Optimizer) ",
        ):
            FP16_Optimizer(again, verbose=False)


class Boxed(torch.Tensor):
    """A tensor subclass with its own dispatch."""

    @staticmethod
    def __new__(cls, data: torch.Tensor) -> "Boxed":
        return torch.Tensor._make_wrapper_subclass(
            cls, data.shape, dtype=data.dtype, requires_grad=True
        )

    @classmethod
    def __torch_dispatch__(
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        raise NotImplementedError(func)


UNSUPPORTED = {
    "complex64": lambda: torch.nn.Parameter(torch.ones(2, 3, dtype=torch.complex64)),
    "float8": lambda: torch.nn.Parameter(torch.ones(2, 3).to(torch.float8_e5m2)),
    "meta": lambda: torch.nn.Parameter(torch.ones(2, 3, device="meta").half()),
    "sparse": lambda: torch.ones(2, 3).half().to_sparse().requires_grad_(),
    "own dispatch": lambda: Boxed(torch.ones(2, 3).half()),
}


@pytest.mark.parametrize("kind", UNSUPPORTED)
def test_refuses_other_trainable_tensors_before_anything_is_changed(kind: str) -> None:
    good, bad = half(1.0), UNSUPPORTED[kind]()
    inner = SGD([{"params": [good]}, {"params": [single(1.0), bad]}], lr=0.5)
    inner.state[good]["momentum_buffer"] = torch.ones(1).half()
    dtype = str(bad.dtype).removeprefix("torch.")
    with pytest.raises(
        TypeError,
        match="^FP16_Optimizer: parameters must be plain strided tensors of float16, "
        r"bfloat16, float32 or float64, but got group 1, index 1: shape \[2, 3\], "
        + dtype,
    ):
        FP16_Optimizer(inner, verbose=False)
    assert inner.param_groups[0]["params"][0] is good
    assert inner.state[good]["momentum_buffer"].dtype == torch.float16
    inner.param_groups[1]["params"].pop()
    FP16_Optimizer(inner, verbose=False)


def test_refuses_lazy_parameters() -> None:
    lazy = torch.nn.UninitializedParameter(dtype=torch.float16)
    inner = SGD([half(1.0)], lr=0.5)
    inner.param_groups[0]["params"].append(lazy)
    with pytest.raises(
        TypeError,
        match="^FP16_Optimizer: parameters must be initialized, "
        "but got a lazy one as group 0, index 1$",
    ):
        FP16_Optimizer(inner, verbose=False)


def test_refuses_groups_whose_params_are_no_list() -> None:
    inner = SGD([half(1.0)], lr=0.5)
    inner.param_groups[0]["params"] = tuple(inner.param_groups[0]["params"])
    with pytest.raises(
        TypeError,
        match="^FP16_Optimizer: the params of a group must be a list, "
        "but got tuple in group 0$",
    ):
        FP16_Optimizer(inner, verbose=False)


def test_refuses_a_parameter_that_stands_in_the_groups_twice() -> None:
    param = half(1.0)
    inner = SGD([param], lr=0.5)
    inner.param_groups[0]["params"].append(param)
    with pytest.raises(
        ValueError,
        match="^FP16_Optimizer: a parameter must stand in the groups once, "
        r"but got it again as group 0, index 1: shape \[1\], float16, cpu$",
    ):
        FP16_Optimizer(inner, verbose=False)
    assert inner.param_groups[0]["params"][0] is param


@pytest.mark.parametrize(
    "kwargs, error, message",
    [
        (
            {"static_loss_scale": None},
            TypeError,
            "FP16_Optimizer: static_loss_scale must be a number without "
            "dynamic_loss_scale, but got None",
        ),
        (
            {"static_loss_scale": 0.0},
            ValueError,
            "LossScaler: scale must be finite and greater than 0, but got 0",
        ),
        (
            {"dynamic_loss_scale": True, "dynamic_loss_args": {"init_scale": INF}},
            ValueError,
            "DynamicLossScaler: init_scale must be finite and greater than 0, "
            "but got inf",
        ),
        (
            {"dynamic_loss_scale": True, "check_overflow": False},
            ValueError,
            "FP16_Optimizer: check_overflow must be on with a dynamic loss scale, "
            "but got off",
        ),
        (
            {"on_min_scale": "stop"},
            ValueError,
            "FP16_Optimizer: on_min_scale must be one of continue, warn, raise, "
            "but got 'stop'",
        ),
        *(
            (
                {"max_consecutive_skips": value},
                ValueError,
                "FP16_Optimizer: max_consecutive_skips must be None or an integer of "
                f"at least 1, but got {value!r}",
            )
            for value in (0, -1, 1.5, "3")
        ),
        (
            {"track_model_writes": None},
            ValueError,
            "FP16_Optimizer: track_model_writes must be one of version, values, "
            "but got None",
        ),
    ],
)
def test_refuses_arguments_without_sense_before_anything_is_changed(
    kwargs: dict[str, Any], error: type[Exception], message: str
) -> None:
    param = half(1.0)
    inner = SGD([param], lr=0.5)
    with pytest.raises(error, match=f"^{re.escape(message)}$"):
        FP16_Optimizer(inner, verbose=False, **kwargs)
    assert inner.param_groups[0]["params"][0] is param
    FP16_Optimizer(inner, verbose=False)


def test_unknown_scaler_arguments_are_a_type_error() -> None:
    with pytest.raises(TypeError, match="scale_windw"):
        wrap_dynamic(half(1.0), scale_windw=10)


def test_static_arguments_are_ignored_under_dynamic_scaling_and_vice_versa() -> None:
    dynamic = wrap(half(1.0), static_loss_scale=None, dynamic_loss_scale=True)
    assert dynamic.loss_scale == 2.0**32
    static = wrap(half(1.0), static_loss_scale=4.0, dynamic_loss_args={"nonsense": 1})
    assert static.loss_scale == 4.0


# backward and scale_loss.


@pytest.mark.parametrize("dtype", HALF_DTYPES, ids=str)
@pytest.mark.parametrize("scale", [1.0, 128.0])
def test_backward_leaves_scaled_model_and_unscaled_master_gradients(
    dtype: torch.dtype, scale: float
) -> None:
    param, native = half(1.0, 2.0, dtype=dtype), single(3.0)
    optimizer = wrap(param, native, static_loss_scale=scale)
    assert optimizer.backward(loss_of(param, native, factor=0.25)) is None
    [master] = masters(optimizer)
    assert_same(param.grad, torch.full((2,), 0.25 * scale, dtype=dtype))
    assert_same(master.grad, torch.full((2,), 0.25))
    assert_same(native.grad, torch.full((1,), 0.25))


def test_unscaling_multiplies_by_the_rounded_reciprocal() -> None:
    scale = 3.0
    param, native, double = half(1.0), single(1.0), half(1.0, dtype=torch.float64)
    optimizer = wrap(param, native, double, static_loss_scale=scale)
    weights = torch.tensor(0.7, dtype=torch.float64)
    optimizer.backward(
        (param.double() * weights + native.double() * weights + double * weights).sum()
    )
    reciprocal = torch.tensor(1.0 / 3.0, dtype=torch.float64)
    [master] = masters(optimizer)
    assert param.grad is not None
    assert_same(master.grad, param.grad.float() * reciprocal.float())
    assert_same(native.grad, (weights * 3).float().view(1) * reciprocal.float())
    assert_same(double.grad, (weights * 3).view(1) * reciprocal)


def test_backward_passes_its_arguments_to_autograd() -> None:
    x, y = half(2.0), half(3.0)
    optimizer = wrap(x, y)
    loss = (x.float() * y.float()).sum()
    optimizer.backward(loss, False, True)
    optimizer.backward(loss, update_master_grads=False, inputs=[x])
    assert x.grad is not None and y.grad is not None
    assert x.grad.item() == 6.0
    assert y.grad.item() == 2.0
    with pytest.raises(RuntimeError, match="second time"):
        optimizer.backward(loss)


# torch warns of the reference cycle that this makes.
@pytest.mark.filterwarnings("ignore:Using backward\\(\\) with create_graph")
def test_create_graph_gives_gradients_of_gradients() -> None:
    x = half(2.0)
    optimizer = wrap(x, static_loss_scale=4.0)
    optimizer.backward((x.float() ** 3).sum(), False, create_graph=True)
    assert x.grad is not None and x.grad.requires_grad
    assert x.grad.item() == 4 * 12.0
    optimizer.zero_grad()
    assert not x.grad.requires_grad


@pytest.mark.parametrize(
    "loss, error, message",
    [
        (1.0, TypeError, "loss must be a tensor, but got float"),
        (
            torch.ones((), dtype=torch.int64),
            TypeError,
            "loss must be a floating point tensor, but got int64",
        ),
        (
            torch.ones((), dtype=torch.complex64),
            TypeError,
            "loss must be a floating point tensor, but got complex64",
        ),
        (
            torch.ones(2, requires_grad=True),
            RuntimeError,
            "loss must be a scalar, but got shape [2]",
        ),
        (
            torch.ones(()),
            RuntimeError,
            "loss must require grad, but got one without a graph",
        ),
    ],
)
def test_backward_refuses_what_is_no_loss(
    loss: Any, error: type[Exception], message: str
) -> None:
    param = half(1.0)
    optimizer = wrap(param, static_loss_scale=4.0)
    for use in (optimizer.backward, optimizer.scale_loss):
        with pytest.raises(
            error, match=f"^{re.escape('FP16_Optimizer.backward: ' + message)}$"
        ):
            use(loss)
    train(optimizer, loss_of(param))
    assert param.item() == 0.5


@pytest.mark.parametrize(
    "dtype, wide",
    [
        (torch.float16, torch.float32),
        (torch.bfloat16, torch.float32),
        (torch.float32, torch.float32),
        (torch.float64, torch.float64),
    ],
)
def test_scale_loss_widens_then_scales(dtype: torch.dtype, wide: torch.dtype) -> None:
    # 60000 * 2**17 is beyond float16.
    loss = torch.tensor(60000.0, dtype=dtype, requires_grad=True)
    optimizer = wrap(half(1.0), static_loss_scale=2.0**17)
    assert_same(optimizer.scale_loss(loss), loss.detach().to(wide) * 2.0**17)


def test_scale_loss_serves_those_who_call_backward_themselves() -> None:
    param = half(1.0)
    optimizer = wrap(param, static_loss_scale=64.0)
    optimizer.scale_loss(loss_of(param, factor=0.5)).backward()
    optimizer.update_master_grads()
    optimizer.step()
    assert param.item() == 0.75


# step, overflow and the counters.


def test_step_writes_masters_rounded_to_the_model() -> None:
    param = half(1.0)
    optimizer = wrap(param, lr=2.0**-12)
    train(optimizer, loss_of(param))
    [master] = masters(optimizer)
    # Half the spacing of float16 below 1, a tie, goes to even.
    assert master.item() == 1.0 - 2.0**-12
    assert param.item() == 1.0
    train(optimizer, loss_of(param))
    assert master.item() == 1.0 - 2.0**-11
    assert param.item() == 1.0 - 2.0**-11


def test_step_returns_what_the_inner_step_returns() -> None:
    class Speaking(SGD):
        def step(self, closure: Any = None) -> Any:
            super().step(closure)
            return "moved"

    param = half(1.0)
    optimizer = FP16_Optimizer(Speaking([param], lr=0.5), verbose=False)
    assert train(optimizer, loss_of(param)) == "moved"
    assert train(optimizer, loss_of(param, factor=INF)) is None


def everything(optimizer: FP16_Optimizer) -> Any:
    """Return a copy of all that a skipped step must leave alone."""
    inner = optimizer.optimizer
    return copy_of([optimizer.fp16_groups, inner.param_groups, inner.state_dict()])


@pytest.mark.parametrize("dtype", HALF_DTYPES, ids=str)
@pytest.mark.parametrize("bad", [INF, -INF, NAN])
@pytest.mark.parametrize("where", ["half", "native"])
@pytest.mark.parametrize("dynamic", [False, True], ids=["static", "dynamic"])
def test_a_non_finite_gradient_skips_the_step_and_touches_nothing(
    dtype: torch.dtype, bad: float, where: str, dynamic: bool
) -> None:
    param, native = half(1.0, 2.0, dtype=dtype), single(3.0, 4.0)
    optimizer = FP16_Optimizer(
        torch.optim.AdamW([param, native], lr=0.1),
        static_loss_scale=16.0,
        dynamic_loss_scale=dynamic,
        dynamic_loss_args={"init_scale": 16.0},
        verbose=False,
    )
    train(optimizer, loss_of(param, native))
    before = everything(optimizer)

    loss = loss_of(param, native)
    loss = loss + ((param if where == "half" else native)[1] * bad).float()
    assert train(optimizer, loss) is None
    assert optimizer.overflow is True
    assert_same(everything(optimizer), before)
    assert (optimizer.steps_applied, optimizer.steps_skipped) == (1, 1)
    assert optimizer.loss_scale == (8.0 if dynamic else 16.0)

    train(optimizer, loss_of(param, native))
    assert optimizer.overflow is False
    assert (optimizer.steps_applied, optimizer.steps_skipped) == (2, 1)


def test_a_second_step_after_an_overflow_does_nothing_more() -> None:
    param = half(1.0)
    optimizer = wrap_dynamic(param, init_scale=16.0)
    train(optimizer, loss_of(param, factor=INF))
    counters = (optimizer.loss_scaler.cur_iter, optimizer.steps_skipped)
    assert optimizer.step() is None
    assert optimizer.overflow is True
    assert optimizer.loss_scale == 8.0
    assert (optimizer.loss_scaler.cur_iter, optimizer.steps_skipped) == counters
    assert param.item() == 1.0


def test_zero_grad_leaves_the_overflow_flag_and_the_next_update_clears_it() -> None:
    param = half(1.0)
    optimizer = wrap(param)
    optimizer.backward(loss_of(param, factor=NAN))
    optimizer.zero_grad()
    assert optimizer.overflow is True
    optimizer.update_master_grads()
    assert optimizer.overflow is False


def test_a_second_step_without_an_update_applies_the_gradients_again() -> None:
    param = half(1.0)
    optimizer = wrap_dynamic(param, init_scale=16.0)
    train(optimizer, loss_of(param))
    optimizer.step()
    assert param.item() == 0.0
    assert optimizer.loss_scaler.cur_iter == 1
    assert optimizer.steps_applied == 2


def test_a_step_without_gradients_calls_the_inner_step_and_moves_no_scale() -> None:
    param = half(1.0)
    inner = SGD([param], lr=0.5)
    calls = []
    inner.register_step_post_hook(lambda *_: calls.append(1))
    optimizer = FP16_Optimizer(
        inner,
        dynamic_loss_scale=True,
        dynamic_loss_args={"init_scale": 4.0, "scale_window": 1},
        verbose=False,
    )
    optimizer.step()
    optimizer.zero_grad(True)
    optimizer.step()
    assert len(calls) == 2
    assert param.item() == 1.0
    assert optimizer.loss_scale == 4.0
    assert optimizer.loss_scaler.cur_iter == 0


def test_an_error_of_the_inner_step_comes_out_and_the_step_can_be_repeated() -> None:
    class Failing(SGD):
        failing = True

        def step(self, closure: Any = None) -> Any:
            if self.failing:
                raise KeyError("of the inner step")
            return super().step(closure)

    param = half(1.0)
    inner = Failing([param], lr=0.5)
    optimizer = FP16_Optimizer(inner, verbose=False)
    with pytest.raises(KeyError, match="of the inner step"):
        train(optimizer, loss_of(param))
    assert (optimizer.steps_applied, optimizer.steps_skipped) == (0, 0)
    inner.failing = False
    optimizer.step()
    assert optimizer.steps_applied == 1
    assert param.item() == 0.5


def test_the_scale_changes_inside_step() -> None:
    param = half(1.0)
    optimizer = wrap_dynamic(param, init_scale=4.0, scale_window=1)
    optimizer.backward(loss_of(param))
    assert optimizer.loss_scale == 4.0
    optimizer.step()
    assert optimizer.loss_scale == 8.0
    optimizer.zero_grad()
    optimizer.backward(loss_of(param, factor=INF))
    assert optimizer.loss_scale == 8.0
    optimizer.step()
    assert optimizer.loss_scale == 4.0


def test_check_overflow_off_lets_inf_and_nan_through() -> None:
    param, native = half(1.0), single(1.0)
    optimizer = wrap(param, native, static_loss_scale=2.0, check_overflow=False)
    train(optimizer, loss_of(param, factor=INF) + loss_of(native))
    assert optimizer.overflow is False
    assert param.item() == -INF
    assert native.item() == 0.5
    assert optimizer.steps_applied == 1


def test_overflow_may_be_set_by_hand() -> None:
    param = half(1.0)
    optimizer = wrap_dynamic(param, init_scale=16.0)
    optimizer.zero_grad()
    optimizer.backward(loss_of(param))
    optimizer.overflow = True
    assert optimizer.step() is None
    assert param.item() == 1.0
    assert optimizer.loss_scale == 8.0
    optimizer.overflow = False
    optimizer.step()
    assert param.item() == 0.5


# clip_master_grads.


@pytest.mark.parametrize("norm_type", [2, 2.0, 1, 3.0, 0.5, INF, "inf"])
@pytest.mark.parametrize("max_norm", [0.5, 100.0])
def test_clip_agrees_with_torch_in_float64(
    max_norm: float, norm_type: float | str
) -> None:
    param, native = half(*[0.0] * 50), single(*[0.0] * 30)
    optimizer = wrap(param, native, static_loss_scale=64.0)
    weights = torch.randn(80)
    optimizer.backward(
        (param.float() * weights[:50]).sum() + (native * weights[50:]).sum()
    )
    [master] = masters(optimizer)
    oracles = [torch.zeros(50).double(), torch.zeros(30).double()]
    for oracle, grad in zip(oracles, (master.grad, native.grad), strict=True):
        assert grad is not None
        oracle.grad = grad.double()
    want = torch.nn.utils.clip_grad_norm_(oracles, max_norm, float(norm_type))
    got = optimizer.clip_master_grads(max_norm, norm_type)
    assert got.dtype == torch.float32 and got.shape == ()
    # One rounding to float32, of the norm and of each clipped element; the partial
    # sums in float32 are of 80 elements.
    tolerance = 4 * torch.finfo(torch.float32).eps
    torch.testing.assert_close(got.double(), want, rtol=tolerance, atol=0)
    for oracle, grad in zip(oracles, (master.grad, native.grad), strict=True):
        assert grad is not None and oracle.grad is not None
        torch.testing.assert_close(grad.double(), oracle.grad, rtol=tolerance, atol=0)


def test_clip_returns_the_norm_before_and_may_be_repeated() -> None:
    param = half(0.0, 0.0)
    optimizer = wrap(param, static_loss_scale=1024.0)
    optimizer.backward((param.float() * torch.tensor([3.0, 4.0])).sum())
    assert optimizer.clip_master_grads(10.0).item() == 5.0
    assert optimizer.clip_master_grads(10.0).item() == 5.0
    assert optimizer.clip_master_grads(2.5).item() == 5.0
    # torch divides by norm + 1e-6, which leaves the norm a little below.
    assert optimizer.clip_master_grads(2.5).item() == pytest.approx(2.5, rel=1e-6)


def test_clip_after_an_overflow_returns_minus_one_and_touches_nothing() -> None:
    param, native = half(1.0), single(1.0)
    optimizer = wrap(param, native, static_loss_scale=8.0)
    optimizer.backward(loss_of(param, factor=INF) + loss_of(native))
    [master] = masters(optimizer)
    before = copy_of([master.grad, native.grad])
    norm = optimizer.clip_master_grads(0.125)
    assert_same(norm, torch.tensor(-1.0))
    assert_same([master.grad, native.grad], before)


@pytest.mark.parametrize("bad", [-1.0, NAN])
def test_clip_refuses_a_max_norm_without_sense(bad: float) -> None:
    with pytest.raises(
        ValueError,
        match="^FP16_Optimizer.clip_master_grads: max_norm must be at least 0, "
        f"but got -?{abs(bad):g}$",
    ):
        wrap(half(1.0)).clip_master_grads(bad)


def test_clip_refuses_a_norm_type_without_sense() -> None:
    with pytest.raises(
        ValueError,
        match="^FP16_Optimizer.clip_master_grads: norm_type must be a number, "
        "but got nan$",
    ):
        wrap(half(1.0)).clip_master_grads(1.0, NAN)


def test_clip_without_gradients_returns_zero() -> None:
    assert_same(wrap(half(1.0)).clip_master_grads(1.0), torch.tensor(0.0))


def test_clip_to_zero_and_with_unchecked_nan() -> None:
    param = half(1.0)
    optimizer = wrap(param, check_overflow=False)
    optimizer.backward(loss_of(param))
    optimizer.clip_master_grads(0.0)
    [master] = masters(optimizer)
    assert_same(master.grad, torch.zeros(1))
    optimizer.backward(loss_of(param, factor=NAN))
    assert optimizer.clip_master_grads(1.0).isnan()
    assert master.grad is not None and master.grad.isnan().all()


def test_clip_uses_a_function_put_into_clip_grad_norm() -> None:
    param, native = half(1.0), single(1.0)
    optimizer = wrap(param, native)
    assert optimizer.clip_grad_norm is torch.nn.utils.clip_grad_norm_
    optimizer.backward(loss_of(param, native))
    seen: list[Any] = []

    def clip(params: Any, max_norm: float, norm_type: float) -> float:
        seen.extend([list(params), max_norm, norm_type])
        return 7.0

    optimizer.clip_grad_norm = clip
    assert optimizer.clip_master_grads(1.0, norm_type=3) == 7.0
    assert seen[0][0] is masters(optimizer)[0]
    assert seen[0][1] is native
    assert seen[1:] == [1.0, 3]


# zero_grad and inspect_master_grad_data.

ZERO = [
    {},
    {"set_grads_to_None": False},
    {"set_to_none": False},
    {"set_grads_to_None": True, "set_to_none": False},
]
DROP = [
    {"set_grads_to_None": True},
    {"set_to_none": True},
    {"set_grads_to_None": False, "set_to_none": True},
]


def graded() -> tuple[FP16_Optimizer, list[torch.Tensor]]:
    """Return an optimizer and all of its tensors, each with a gradient."""
    frozen = torch.nn.Parameter(torch.ones(2), requires_grad=False)
    param, native = half(1.0), single(1.0)
    optimizer = wrap(param, native, frozen)
    frozen.grad = torch.ones(2)
    optimizer.backward(loss_of(param, native))
    return optimizer, [param, native, frozen, *masters(optimizer)]


@pytest.mark.parametrize("kwargs", ZERO, ids=str)
def test_zero_grad_zeroes_all_gradients_in_place(kwargs: dict[str, bool]) -> None:
    optimizer, tensors = graded()
    grads = [tensor.grad for tensor in tensors]
    optimizer.zero_grad(**kwargs)
    for tensor, grad in zip(tensors, grads, strict=True):
        assert grad is not None
        assert tensor.grad is grad
        assert_same(grad, torch.zeros_like(grad))


@pytest.mark.parametrize("kwargs", DROP, ids=str)
def test_zero_grad_drops_all_gradients(kwargs: dict[str, bool]) -> None:
    optimizer, tensors = graded()
    optimizer.zero_grad(**kwargs)
    assert all(tensor.grad is None for tensor in tensors)


def test_zero_grad_takes_its_argument_by_position() -> None:
    optimizer, tensors = graded()
    optimizer.zero_grad(True)
    assert all(tensor.grad is None for tensor in tensors)


def test_inspect_returns_the_gradients_that_the_inner_optimizer_sees() -> None:
    frozen = torch.nn.Parameter(torch.ones(1).half(), requires_grad=False)
    param, native, unused = half(1.0), single(1.0), half(1.0)
    inner = SGD([{"params": [frozen, param]}, {"params": [unused, native]}], lr=0.5)
    optimizer = FP16_Optimizer(inner, static_loss_scale=8.0, verbose=False)
    optimizer.backward(loss_of(param, native))
    grads = optimizer.inspect_master_grad_data()
    assert_same(grads, [[None, torch.ones(1)], [None, torch.ones(1)]])
    assert grads is not None
    grads[0][1].mul_(2)
    grads[1][1].mul_(4)
    optimizer.step()
    assert param.item() == 0.0
    assert native.item() == -1.0


def test_inspect_after_an_overflow_warns_and_returns_none(
    capsys: pytest.CaptureFixture[str],
) -> None:
    param = half(1.0)
    optimizer = wrap(param)
    optimizer.backward(loss_of(param, factor=INF))
    assert optimizer.inspect_master_grad_data() is None
    assert re.fullmatch(
        r"Warning: FP16_Optimizer\.inspect_master_grad_data called after an overflow: "
        r"the gradients are invalid, returning None\.\n",
        capsys.readouterr().out,
    )


# The report.


def test_gradient_report_names_what_was_found() -> None:
    param, native, unused = half(0.0, 0.0), single(0.0), half(1.0)
    inner = SGD([{"params": [unused, param]}, {"params": [native]}], lr=0.5)
    optimizer = FP16_Optimizer(inner, static_loss_scale=4.0, verbose=False)
    optimizer.backward((param.float() * torch.tensor([3.0, 4.0])).sum() + 12 * native)
    report = optimizer.gradient_report()
    assert report.overflow is False
    assert report.norm == 13.0
    assert report.largest == 12.0
    assert report.first_offender() is None
    first, second = report.tensors
    assert (first.group, first.index, first.norm, first.largest) == (0, 1, 5.0, 4.0)
    assert (second.group, second.index, second.norm) == (1, 0, 12.0)
    assert first.parameter is param
    assert second.parameter is native


def test_gradient_report_is_empty_before_the_first_update() -> None:
    report = wrap(half(1.0)).gradient_report()
    assert (report.tensors, report.norm, report.overflow) == ([], 0.0, False)


def test_gradient_report_counts_inf_and_nan_of_the_first_offender() -> None:
    param, second = half(*[0.0] * 5), half(0.0)
    optimizer = wrap(param, second)
    weights = torch.tensor([INF, NAN, 1.0, -INF, 2.0])
    optimizer.backward((param.float() * weights).sum() + second.float().sum() * NAN)
    report = optimizer.gradient_report()
    assert report.overflow is True
    offender = report.first_offender()
    assert offender is not None
    assert (offender.index, offender.inf_count, offender.nan_count) == (0, 2, 1)
    assert str(offender) == (
        "group 0, index 0: shape [5], float16, cpu, with 2 inf and 1 NaN"
    )


# Properties.


def test_loss_scale_reads_and_sets_the_scaler_and_keeps_its_counters() -> None:
    param = half(1.0)
    optimizer = wrap_dynamic(param, init_scale=4.0)
    train(optimizer, loss_of(param))
    optimizer.loss_scale = 64
    assert optimizer.loss_scale == optimizer.loss_scaler.cur_scale == 64.0
    assert optimizer.loss_scaler.cur_iter == 1
    optimizer.loss_scaler.cur_scale = 32.0
    assert optimizer.loss_scale == 32.0


@pytest.mark.parametrize("value", [0.0, -1.0, INF, NAN])
@pytest.mark.parametrize(
    "dynamic, owner", [(False, "LossScaler"), (True, "DynamicLossScaler")]
)
def test_loss_scale_refuses_values_without_sense(
    value: float, dynamic: bool, owner: str
) -> None:
    optimizer = wrap(half(1.0), static_loss_scale=4.0, dynamic_loss_scale=dynamic)
    before = optimizer.loss_scale
    with pytest.raises(
        ValueError,
        match=f"^{owner}.loss_scale: must be finite and greater than 0, "
        f"but got {value:g}$",
    ):
        optimizer.loss_scale = value
    assert optimizer.loss_scale == before


def test_dynamic_loss_scale_may_be_switched() -> None:
    param = half(1.0)
    optimizer = wrap(param, static_loss_scale=8.0)
    assert optimizer.dynamic_loss_scale is False
    optimizer.dynamic_loss_scale = True
    assert type(optimizer.loss_scaler) is DynamicLossScaler
    train(optimizer, loss_of(param, factor=INF))
    assert optimizer.loss_scale == 4.0
    optimizer.dynamic_loss_scale = False
    assert type(optimizer.loss_scaler) is LossScaler
    train(optimizer, loss_of(param, factor=INF))
    assert optimizer.loss_scale == 4.0


def test_param_groups_state_and_defaults_are_those_of_the_inner_optimizer() -> None:
    inner = torch.optim.Adam([half(1.0)], lr=0.5)
    optimizer = FP16_Optimizer(inner, verbose=False)
    assert optimizer.param_groups is inner.param_groups
    assert optimizer.state is inner.state
    assert optimizer.defaults is inner.defaults
    groups, state = list(inner.param_groups), copy.copy(inner.state)
    optimizer.param_groups = groups
    optimizer.state = state
    assert inner.param_groups is groups
    assert inner.state is state


def test_first_closure_call_this_step_can_be_read_and_set() -> None:
    optimizer = wrap(half(1.0))
    assert optimizer.first_closure_call_this_step is True
    optimizer.first_closure_call_this_step = False
    assert optimizer.first_closure_call_this_step is False


def test_repr_names_scale_and_inner_optimizer() -> None:
    optimizer = wrap(half(1.0), static_loss_scale=4.0)
    start = "FP16_Optimizer(static loss scale 4, fused SGD step, SGD ("
    assert repr(optimizer).startswith(start)


def test_maybe_print_prints_if_verbose(capsys: pytest.CaptureFixture[str]) -> None:
    optimizer = wrap(half(1.0))
    optimizer.maybe_print("quiet")
    optimizer.verbose = True
    optimizer.maybe_print("loud")
    assert capsys.readouterr().out == "loud\n"


# The underscore names that subclasses compose.


def test_the_pieces_of_an_update_add_up_to_it() -> None:
    param, native = half(1.0), single(1.0)
    optimizer = wrap(param, native, static_loss_scale=8.0)
    optimizer.backward(loss_of(param, native), update_master_grads=False)
    optimizer._check_overflow()
    assert optimizer.overflow is False
    optimizer._model_grads_to_master_grads()
    [master] = masters(optimizer)
    assert_same([master.grad, native.grad], [torch.full((1,), 8.0)] * 2)
    optimizer._downscale_master()
    assert_same([master.grad, native.grad], [torch.ones(1)] * 2)
    optimizer.step()
    assert (param.item(), native.item()) == (0.5, 0.5)


def test_check_overflow_looks_at_half_and_native_gradients() -> None:
    param, native = half(1.0), single(1.0)
    optimizer = wrap(param, native)
    for factors in ((INF, 1.0), (1.0, NAN)):
        optimizer.overflow = False
        optimizer.zero_grad()
        optimizer.backward(
            loss_of(param, factor=factors[0]) + loss_of(native, factor=factors[1]),
            update_master_grads=False,
        )
        optimizer._check_overflow()
        assert optimizer.overflow is True


def test_update_scale_forwards_to_the_scaler() -> None:
    optimizer = wrap_dynamic(half(1.0), init_scale=8.0, scale_window=2)
    optimizer._update_scale(True)
    assert optimizer.loss_scale == 4.0
    optimizer._update_scale()
    optimizer._update_scale()
    assert optimizer.loss_scale == 8.0


def test_weights_are_copied_in_both_directions_by_hand() -> None:
    param = half(1.0)
    optimizer = wrap(param)
    [master] = masters(optimizer)
    with torch.no_grad():
        master.fill_(0.1)
    optimizer._master_params_to_model_params()
    assert_same(param.detach(), torch.tensor([0.1]).half())
    optimizer._model_params_to_master_params()
    assert_same(master.detach(), torch.tensor([0.1]).half().float())
