"""The list kernels through FP16_Optimizer: overflow, unscaling, layouts, norms."""

import math
from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode

from fp16core import FP16_Optimizer, _core

HALF_TYPES = [torch.float16, torch.bfloat16]
NATIVE_TYPES = [torch.float32, torch.float64]
DTYPES = HALF_TYPES + NATIVE_TYPES

each_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=str)

# Partial sums hold 256 squares in fp32: each square and each addition is rounded
# once, by 2^-24 of what is there; the root halves a relative error.
NORM_TOLERANCE = 257 * 2.0**-24 / 2


def wrap(*params: torch.Tensor, scale: float = 1.0, **kwargs: object) -> FP16_Optimizer:
    inner = torch.optim.SGD(list(params), lr=1.0)
    return FP16_Optimizer(inner, static_loss_scale=scale, verbose=False, **kwargs)  # type: ignore[arg-type]


def leaf(tensor: torch.Tensor) -> torch.nn.Parameter:
    return torch.nn.Parameter(tensor)


def take(
    *gradients: torch.Tensor, scale: float = 1.0
) -> tuple[FP16_Optimizer, list[torch.Tensor]]:
    """Give parameters these gradients and return what the inner optimizer sees."""
    params = [leaf(torch.zeros_like(g.to_dense())) for g in gradients]
    optimizer = wrap(*params, scale=scale)
    for param, gradient in zip(params, gradients, strict=True):
        param.grad = gradient.clone() if gradient.layout == torch.strided else gradient
    optimizer.update_master_grads()
    return optimizer, [p.grad for p in optimizer.param_groups[0]["params"]]


def coo(
    indices: torch.Tensor | list[list[int]],
    values: torch.Tensor,
    shape: tuple[int, ...],
) -> torch.Tensor:
    return torch.sparse_coo_tensor(indices, values, shape, check_invariants=True)


def unscaled(gradient: torch.Tensor, scale: float) -> torch.Tensor:
    """One product with the reciprocal, rounded once, by way of float64."""
    if gradient.dtype == torch.float64:
        return gradient * (1.0 / scale)
    reciprocal = torch.tensor(1.0 / scale, dtype=torch.float64).float().double()
    return (gradient.double() * reciprocal).float()


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Equal in dtype, shape and bits, the sign of zero included."""
    if a.dtype != b.dtype or a.shape != b.shape:
        return False
    x, y = (t.flatten().clone(memory_format=torch.contiguous_format) for t in (a, b))
    return torch.equal(x.view(torch.uint8), y.view(torch.uint8))


# ---- overflow ----

# First, last, and both sides of every place where a vector (16), a partial sum
# (4096) or a chunk (65536) ends.
LENGTH = 65536 + 4096 + 21
PLACES = sorted(
    {
        place
        for edge in (0, 16, 32, 4096, 8192, 65536, 65536 + 16, LENGTH - 5, LENGTH)
        for place in (edge - 1, edge, edge + 1)
        if 0 <= place < LENGTH
    }
)


@each_dtype
@pytest.mark.parametrize("bad", [math.inf, -math.inf, math.nan])
def test_single_nonfinite_element_is_found_everywhere(
    dtype: torch.dtype, bad: float
) -> None:
    param = leaf(torch.zeros(LENGTH, dtype=dtype))
    optimizer = wrap(param, scale=2.0)
    clean = torch.linspace(-1, 1, LENGTH).to(dtype)
    for place in PLACES:
        param.grad = clean.clone()
        param.grad[place] = bad
        optimizer.update_master_grads()
        assert optimizer.overflow, place
        (found,) = optimizer.gradient_report().tensors
        assert found.inf_count == int(math.isinf(bad)), place
        assert found.nan_count == int(math.isnan(bad)), place
    param.grad = clean.clone()
    optimizer.update_master_grads()
    assert not optimizer.overflow


@each_dtype
def test_overflow_is_found_in_any_of_many_tensors(dtype: torch.dtype) -> None:
    params = [leaf(torch.zeros(n, dtype=dtype)) for n in (1, 0, 3, 17, 300, 1)]
    optimizer = wrap(*params)
    for number, victim in enumerate(params):
        if not victim.numel():
            continue
        for param in params:
            param.grad = torch.ones_like(param)
        victim.grad[-1] = math.inf
        optimizer.update_master_grads()
        offender = optimizer.gradient_report().first_offender()
        assert optimizer.overflow
        assert offender.index == number
        assert offender.parameter is victim


@each_dtype
@pytest.mark.parametrize("sign", [1, -1])
def test_finite_extremes_are_no_overflow(dtype: torch.dtype, sign: int) -> None:
    extreme = torch.full((70000,), sign * torch.finfo(dtype).max, dtype=dtype)
    optimizer, _ = take(extreme)
    assert not optimizer.overflow
    assert optimizer.gradient_report().largest == torch.finfo(dtype).max


@each_dtype
def test_extremes_of_both_signs_cancel_in_no_sum(dtype: torch.dtype) -> None:
    extreme = torch.full((4097,), torch.finfo(dtype).max, dtype=dtype)
    extreme[::2] *= -1
    extreme[1::3] = torch.finfo(dtype).smallest_normal
    optimizer, _ = take(extreme, scale=3.0)
    assert not optimizer.overflow


@each_dtype
def test_many_nonfinite_elements_are_counted(dtype: torch.dtype) -> None:
    gradient = torch.ones(10000, dtype=dtype)
    gradient[::7] = math.inf
    gradient[3::7] = -math.inf
    gradient[5::7] = math.nan
    optimizer, _ = take(gradient)
    (found,) = optimizer.gradient_report().tensors
    assert found.inf_count == int(gradient.isinf().sum())
    assert found.nan_count == int(gradient.isnan().sum())


@pytest.mark.parametrize("dtype", NATIVE_TYPES, ids=str)
@pytest.mark.parametrize("scale", [0.5, 1.0, 2.0])
def test_counts_are_those_of_the_scaled_gradient(
    dtype: torch.dtype, scale: float
) -> None:
    # Divided by 0.5 in place the first element leaves the range, but it was finite.
    gradient = torch.tensor([torch.finfo(dtype).max, math.inf, 1.0], dtype=dtype)
    optimizer, _ = take(gradient, scale=scale)
    (found,) = optimizer.gradient_report().tensors
    assert (found.inf_count, found.nan_count) == (1, 0)


@each_dtype
def test_gradients_are_still_seen_after_an_overflow(dtype: torch.dtype) -> None:
    param = leaf(torch.ones(5, dtype=dtype))
    optimizer = wrap(param, scale=4.0)
    param.grad = torch.full_like(param, math.inf)
    optimizer.update_master_grads()
    param.grad = torch.full_like(param, 8.0)
    optimizer.update_master_grads()
    assert not optimizer.overflow
    assert optimizer.param_groups[0]["params"][0].grad.tolist() == [2.0] * 5


# ---- unscaling ----


@pytest.mark.parametrize("dtype", HALF_TYPES, ids=str)
@pytest.mark.parametrize("scale", [1.0, 2.0**16, 2.0**32, 3.0, 1e5, 0.7])
def test_every_half_value_is_unscaled_right(dtype: torch.dtype, scale: float) -> None:
    every = torch.arange(-(2**15), 2**15, dtype=torch.int16).view(dtype)
    finite = every[every.isfinite()]
    optimizer, (gradient,) = take(finite, scale=scale)
    assert not optimizer.overflow
    assert same_bits(gradient, unscaled(finite, scale))


@pytest.mark.parametrize("dtype", NATIVE_TYPES, ids=str)
@pytest.mark.parametrize("scale", [1.0, 2.0**16, 2.0**-3, 3.0, 1e5, 0.7])
def test_native_gradients_are_unscaled_right(dtype: torch.dtype, scale: float) -> None:
    # From subnormal to 2^100, so that no product overflows.
    exponents = torch.linspace(-149, 100, 5003, dtype=torch.float64)
    values = (torch.exp2(exponents) * 1.37).to(dtype)
    values[::2] *= -1
    _, (gradient,) = take(values, scale=scale)
    assert same_bits(gradient, unscaled(values, scale))


@each_dtype
def test_signed_zeros_and_subnormals_survive(dtype: torch.dtype) -> None:
    tiny = torch.finfo(dtype).smallest_normal * torch.finfo(dtype).eps
    values = torch.tensor([0.0, -0.0, tiny, -tiny], dtype=dtype).repeat(9)
    _, (gradient,) = take(values)
    assert same_bits(gradient, values.to(gradient.dtype))


@pytest.mark.parametrize("dtype", HALF_TYPES, ids=str)
def test_model_gradients_are_only_read(dtype: torch.dtype) -> None:
    param = leaf(torch.zeros(4000, dtype=dtype))
    optimizer = wrap(param, scale=3.0)
    param.grad = torch.randn(4000).to(dtype)
    before, version = param.grad.clone(), param.grad._version
    optimizer.update_master_grads()
    assert same_bits(param.grad, before)
    assert param.grad._version == version


def test_writes_raise_the_version_counter() -> None:
    half, native = leaf(torch.zeros(4).half()), leaf(torch.zeros(4))
    optimizer = wrap(half, native, scale=4.0)
    half.grad, native.grad = torch.ones(4).half(), torch.ones(4)
    optimizer.update_master_grads()
    (master,) = optimizer.fp32_from_fp16_groups[0]
    for update in (
        optimizer.update_master_grads,
        lambda: optimizer.clip_master_grads(0.01),
        optimizer.zero_grad,
    ):
        before = master.grad._version
        update()
        assert master.grad._version > before
    before = half._version
    optimizer.step()
    assert half._version > before


# ---- layouts ----


def channels_last(values: torch.Tensor) -> torch.Tensor:
    return values.clone(memory_format=torch.channels_last)


def transposed(values: torch.Tensor) -> torch.Tensor:
    turned = values.transpose(0, 3)
    return turned.clone(memory_format=torch.contiguous_format).transpose(0, 3)


def gapped(values: torch.Tensor) -> torch.Tensor:
    buffer = torch.full((*values.shape[:-1], 2 * values.shape[-1]), 99.0).to(values)
    buffer[..., ::2] = values
    return buffer[..., ::2]


def offset(values: torch.Tensor) -> torch.Tensor:
    buffer = torch.full((values.numel() + 7,), 99.0).to(values)
    buffer[3:-4] = values.flatten()
    return buffer[3:-4].view(values.shape)


def odd_strides_of_ones(values: torch.Tensor) -> torch.Tensor:
    """A dimension of one element may have any stride."""
    buffer = values.flatten().clone()
    strides = [
        1234 if n == 1 else s
        for n, s in zip(values.shape, values.contiguous().stride(), strict=True)
    ]
    return buffer.as_strided(values.shape, strides)


LAYOUTS: list[Callable[[torch.Tensor], torch.Tensor]] = [
    torch.clone,
    channels_last,
    transposed,
    gapped,
    offset,
    odd_strides_of_ones,
]


@each_dtype
@pytest.mark.parametrize("lay_gradient", LAYOUTS)
@pytest.mark.parametrize("lay_parameter", LAYOUTS)
@pytest.mark.parametrize("shape", [(4, 3, 2, 5), (3, 1, 7, 1)])
def test_elements_pair_by_index(
    shape: tuple[int, ...],
    lay_parameter: Callable[[torch.Tensor], torch.Tensor],
    lay_gradient: Callable[[torch.Tensor], torch.Tensor],
    dtype: torch.dtype,
) -> None:
    values = torch.arange(math.prod(shape)).view(shape).to(dtype)
    param = leaf(lay_parameter(values))
    optimizer = wrap(param, scale=4.0)
    param.grad = lay_gradient(values * 2)
    optimizer.update_master_grads()
    (seen,) = optimizer.param_groups[0]["params"]
    assert torch.equal(seen.grad.double(), values.double() / 2)
    assert float(optimizer.clip_master_grads(math.inf)) == pytest.approx(
        float(torch.linalg.vector_norm(values.double() / 2)), rel=1e-7
    )  # whole numbers are summed exactly; the result is one fp32 number
    optimizer.step()
    assert torch.equal(param.detach().double(), values.double() / 2)


@each_dtype
def test_gaps_around_views_are_left_alone(dtype: torch.dtype) -> None:
    buffer = torch.full((10, 10), 7.0, dtype=dtype)
    gradients = torch.full((10, 10), 4.0, dtype=dtype)
    params = [leaf(buffer[i : i + 2, 1:9:3]) for i in (0, 2, 7)]
    optimizer = wrap(*params, scale=2.0)
    for param, i in zip(params, (0, 2, 7), strict=True):
        param.grad = gradients[i : i + 2, 1:9:3]
    optimizer.update_master_grads()
    optimizer.step()
    inside = torch.zeros(10, 10, dtype=torch.bool)
    for i in (0, 2, 7):
        inside[i : i + 2, 1:9:3] = True
    assert torch.equal(buffer, torch.where(inside, 5.0, 7.0).to(dtype))
    half = dtype in HALF_TYPES
    expected = torch.full((10, 10), 4.0) if half else torch.where(inside, 2.0, 4.0)
    assert torch.equal(gradients, expected.to(dtype))


@each_dtype
@pytest.mark.parametrize("scale", [1.0, 4.0])
def test_expanded_gradients(dtype: torch.dtype, scale: float) -> None:
    param = leaf(torch.ones(3, 5, dtype=dtype))
    optimizer = wrap(param, scale=scale)
    row = torch.arange(5, dtype=dtype) * scale
    param.grad = row.expand(3, 5)
    optimizer.update_master_grads()
    (seen,) = optimizer.param_groups[0]["params"]
    assert seen.grad.tolist() == [[0.0, 1.0, 2.0, 3.0, 4.0]] * 3
    assert float(optimizer.clip_master_grads(1e6, math.inf)) == 4.0
    optimizer.clip_master_grads(2.0, math.inf)
    largest = float(optimizer.clip_master_grads(1e6, math.inf))
    assert largest == pytest.approx(2.0, rel=1e-6)  # torch's 1e-6 beside the norm
    optimizer.update_master_grads()
    optimizer.step()
    assert param.tolist() == [[1.0, 0.0, -1.0, -2.0, -3.0]] * 3


@each_dtype
def test_scalars_and_empty_tensors(dtype: torch.dtype) -> None:
    scalar = leaf(torch.tensor(3.0, dtype=dtype))
    empty = leaf(torch.empty(0, 4, dtype=dtype))
    optimizer = wrap(empty, scalar, scale=4.0)
    scalar.grad, empty.grad = torch.full_like(scalar, 8.0), torch.empty_like(empty)
    optimizer.update_master_grads()
    assert not optimizer.overflow
    assert float(optimizer.clip_master_grads(10.0)) == 2.0
    optimizer.step()
    assert scalar.item() == 1.0
    scalar.grad.fill_(math.nan)
    optimizer.update_master_grads()
    assert optimizer.overflow


@each_dtype
def test_only_empty_tensors(dtype: torch.dtype) -> None:
    param = leaf(torch.empty(0, dtype=dtype))
    optimizer = wrap(param)
    param.grad = torch.empty_like(param)
    optimizer.update_master_grads()
    assert not optimizer.overflow
    assert float(optimizer.clip_master_grads(1.0)) == 0.0
    optimizer.step()


@pytest.mark.parametrize("wide", NATIVE_TYPES, ids=str)
@pytest.mark.parametrize("narrow", HALF_TYPES, ids=str)
def test_a_model_that_turned_wide_after_wrapping(
    narrow: torch.dtype, wide: torch.dtype
) -> None:
    model = torch.nn.Linear(300, 300).to(narrow)
    optimizer = wrap(*model.parameters(), scale=2.0)
    model.to(wide)
    optimizer.backward(model(torch.ones(1, 300, dtype=wide)).sum())
    for gradient in optimizer.inspect_master_grad_data()[0]:
        assert gradient.dtype == torch.float32
        assert torch.equal(gradient, torch.ones_like(gradient))
    before = [p.detach().clone() for p in model.parameters()]
    optimizer.step()
    for param, old in zip(model.parameters(), before, strict=True):
        assert param.dtype == wide
        assert torch.equal(param.detach(), (old.float() - 1).to(wide))


# ---- sparse ----


@pytest.mark.parametrize("dtype", HALF_TYPES, ids=str)
def test_sparse_duplicates_are_summed_in_float32(dtype: torch.dtype) -> None:
    # 40000 + 40000 is beyond half, and 256 + 1 between two bf16 values.
    indices = torch.tensor([[2, 0, 2, 1, 1]])
    values = torch.tensor([40000.0, 1.0, 40000.0, 256.0, 1.0], dtype=dtype)
    optimizer, (gradient,) = take(coo(indices, values, (4,)), scale=2.0)
    assert not optimizer.overflow
    assert gradient.is_sparse
    large = float(values[0])
    assert gradient.to_dense().tolist() == [0.5, 128.5, large, 0.0]
    assert float(optimizer.clip_master_grads(1e9, math.inf)) == large


@pytest.mark.parametrize("dtype", NATIVE_TYPES, ids=str)
def test_sparse_native_gradients(dtype: torch.dtype) -> None:
    param = leaf(torch.zeros(4, 2, dtype=dtype))
    optimizer = wrap(param, scale=4.0)
    indices = torch.tensor([[2, 0, 2]])
    values = torch.tensor([[4.0, 8.0], [1.0, 2.0], [12.0, 16.0]], dtype=dtype)
    param.grad = coo(indices, values, (4, 2))
    for _ in range(2):
        optimizer.update_master_grads()
        assert param.grad.to_dense().tolist() == [
            [0.25, 0.5],
            [0.0, 0.0],
            [4.0, 6.0],
            [0.0, 0.0],
        ]
    optimizer.step()
    assert param.tolist()[2] == [-4.0, -6.0]


@each_dtype
@pytest.mark.parametrize("bad", [math.inf, math.nan])
def test_sparse_overflow(dtype: torch.dtype, bad: float) -> None:
    values = torch.tensor([1.0, bad], dtype=dtype)
    optimizer, _ = take(coo([[3, 1]], values, (5,)))
    assert optimizer.overflow


@each_dtype
def test_sparse_without_elements(dtype: torch.dtype) -> None:
    empty = coo(torch.empty(1, 0, dtype=torch.long), torch.empty(0, dtype=dtype), (5,))
    optimizer, (gradient,) = take(empty)
    assert not optimizer.overflow
    assert gradient._nnz() == 0
    assert float(optimizer.clip_master_grads(1.0)) == 0.0


@each_dtype
def test_sparse_gradients_of_an_embedding_train(dtype: torch.dtype) -> None:
    embedding = torch.nn.Embedding(6, 3, sparse=True, dtype=dtype)
    start = embedding.weight.detach().clone()
    optimizer = wrap(embedding.weight, scale=8.0)
    optimizer.backward(embedding(torch.tensor([1, 4, 4])).to(torch.float32).sum())
    optimizer.step()
    counts = torch.tensor([0.0, 1.0, 0.0, 0.0, 2.0, 0.0], dtype=torch.float64)
    master = torch.float64 if dtype == torch.float64 else torch.float32
    expected = (start.to(master) - counts[:, None].to(master)).to(dtype)
    assert same_bits(embedding.weight.detach(), expected)


# ---- norms and clipping ----

NORM_TYPES = [2.0, math.inf, 1.0, 3.0, 0.5, -math.inf]


def mixed_gradients() -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(3)
    sizes = [(7,), (300, 31), (1,), (70001,)]
    return [
        (torch.randn(size, generator=generator) * 10.0**i).to(dtype)
        for i, (size, dtype) in enumerate(zip(sizes, DTYPES, strict=True))
    ]


@pytest.mark.parametrize("norm_type", NORM_TYPES)
def test_norm_is_that_of_torch_in_float64(norm_type: float) -> None:
    gradients = mixed_gradients()
    optimizer, _ = take(*gradients, scale=8.0)
    norm = optimizer.clip_master_grads(1e30, norm_type)
    oracle = torch.nn.utils.get_total_norm(
        [g.double() / 8 for g in gradients], norm_type
    )
    assert norm.shape == () and norm.dtype == torch.float32
    # Others than the 2-norm are accumulated in fp64: what is left is the fp32 result.
    tolerance = NORM_TOLERANCE if norm_type == 2 else 0.0
    assert float(norm) == pytest.approx(float(oracle), rel=tolerance + 2.0**-24)


def test_norm_of_order_zero_counts_the_elements_that_are_not_zero() -> None:
    # torch counts the tensors that are not all zeros.
    optimizer, _ = take(torch.tensor([1.0, 0.0, -2.0]), torch.tensor([0.0, 3.0]))
    assert optimizer.clip_master_grads(1e30, 0).item() == 3.0


@pytest.mark.parametrize("norm_type", [2.0, math.inf, 1.0, 3.0])
@pytest.mark.parametrize("max_norm", [0.0, 1e-3, 1.0])
def test_clipping_multiplies_by_the_coefficient_of_torch(
    max_norm: float, norm_type: float
) -> None:
    # Powers of two times whole numbers, so that the norm is exact in fp32 too.
    gradients = [torch.tensor([3.0, -4.0, 12.0, 0.5]).to(dtype) for dtype in DTYPES]
    optimizer, masters = take(*gradients, scale=1.0)
    optimizer.clip_master_grads(max_norm, norm_type)
    exact = torch.cat([g.double() for g in gradients])
    norm = float(torch.linalg.vector_norm(exact, norm_type))
    coefficient = torch.tensor(max_norm / (norm + 1e-6), dtype=torch.float64)
    for gradient, clipped in zip(gradients, masters, strict=True):
        if gradient.dtype == torch.float64:
            # The norm's last bit is the order of its sum.
            torch.testing.assert_close(
                clipped, gradient * coefficient, rtol=4 * 2.0**-53, atol=0
            )
        else:
            factor = coefficient.float().double()
            assert same_bits(clipped, (gradient.double() * factor).float())


@pytest.mark.parametrize("norm_type", NORM_TYPES)
def test_norm_within_the_bound_leaves_gradients_alone(norm_type: float) -> None:
    optimizer, masters = take(*mixed_gradients(), scale=8.0)
    before = [m.clone() for m in masters]
    optimizer.clip_master_grads(1e30, norm_type)
    assert all(same_bits(a, b) for a, b in zip(masters, before, strict=True))


@pytest.mark.parametrize("dtype", [torch.bfloat16, *NATIVE_TYPES], ids=str)
@pytest.mark.parametrize("magnitude", [1e-38, 1e-30, 1e-23, 1e20, 1e30])
def test_norm_of_values_whose_squares_leave_float32(
    dtype: torch.dtype, magnitude: float
) -> None:
    gradient = torch.full((5000,), magnitude, dtype=dtype)
    optimizer, _ = take(gradient, scale=4.0)
    norm = optimizer.clip_master_grads(1e38)
    oracle = torch.linalg.vector_norm(unscaled(gradient, 4.0).double())
    # Summed in fp64: what is left is the rounding of the result.
    assert float(norm) == pytest.approx(float(oracle), rel=2.0**-24)


def test_norm_is_inf_only_beyond_float32() -> None:
    largest = torch.finfo(torch.float32).max
    optimizer, _ = take(torch.full((4,), largest / 2.0001))
    assert float(optimizer.clip_master_grads(1.0)) == pytest.approx(largest, rel=1e-4)
    optimizer, (gradient,) = take(torch.full((5,), largest))
    assert not optimizer.overflow
    assert float(optimizer.clip_master_grads(1.0)) == math.inf
    # The coefficient is computed in fp64, so the gradients are clipped all the same.
    assert gradient.tolist() == pytest.approx([5**-0.5] * 5, rel=1e-6)


def test_norm_of_float64_gradients_beyond_float32() -> None:
    optimizer, (gradient,) = take(torch.tensor([3e50, 4e50], dtype=torch.float64))
    assert not optimizer.overflow
    assert float(optimizer.clip_master_grads(10.0)) == math.inf
    assert gradient.tolist() == pytest.approx([6.0, 8.0], rel=1e-15)


def test_report_stays_that_of_the_last_update() -> None:
    optimizer, masters = take(torch.tensor([3.0, -4.0]).half(), torch.zeros(1))
    optimizer.clip_master_grads(1.0)
    masters[0].mul_(2.0)
    # Beside the norm torch adds 1e-6 to the divisor.
    assert float(optimizer.clip_master_grads(1.0)) == pytest.approx(2.0, rel=1e-6)
    report = optimizer.gradient_report()
    assert (report.norm, report.largest) == (5.0, 4.0)
    assert [found.norm for found in report.tensors] == [5.0, 0.0]


# ---- the plain check ----


@each_dtype
@pytest.mark.parametrize("lay", LAYOUTS)
def test_has_overflow_reads_any_layout(
    lay: Callable[[torch.Tensor], torch.Tensor], dtype: torch.dtype
) -> None:
    values = torch.ones(4, 3, 2, 5, dtype=dtype)
    assert not _core.has_overflow([lay(values)])
    values[2, 1, 1, 4] = -math.inf
    assert _core.has_overflow([lay(values)])


def test_has_overflow_does_not_see_what_a_view_leaves_out() -> None:
    buffer = torch.full((10, 10), math.nan, dtype=torch.float16)
    buffer[1:9:3, ::2] = 1.0
    assert not _core.has_overflow([buffer[1:9:3, ::2]])


class Recorder(TorchDispatchMode):
    """Notes the names of the operators that run."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        self.names.append(str(func))
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("lay", [torch.clone, channels_last, transposed, offset])
def test_has_overflow_copies_no_dense_tensor(
    lay: Callable[[torch.Tensor], torch.Tensor],
) -> None:
    tensor = lay(torch.ones(4, 3, 2, 5))
    with Recorder() as recorder:
        _core.has_overflow([tensor])
    assert not [name for name in recorder.names if "clone" in name or "copy" in name]


def test_steady_state_allocates_nothing() -> None:
    params = [leaf(torch.ones(100, 20, dtype=dtype)) for dtype in DTYPES]
    params.append(leaf(torch.ones(100, 20).half().t()))
    optimizer = wrap(*params, scale=2.0)
    for param in params:
        param.grad = torch.ones_like(param)

    def iterate() -> None:
        optimizer.update_master_grads()
        optimizer.clip_master_grads(1.0)

    iterate()
    with Recorder() as recorder:
        iterate()
    # But for the norm, which is returned as a tensor.
    assert not [n for n in recorder.names if "empty" in n or "copy" in n], (
        recorder.names
    )


# ---- any input ----

half_types = st.sampled_from(HALF_TYPES)
scales = st.one_of(
    st.integers(-8, 40).map(lambda e: 2.0**e), st.floats(1e-3, 1e9, width=64)
)


@st.composite
def strided(
    draw: st.DrawFn, shape: tuple[int, ...], dtype: torch.dtype
) -> torch.Tensor:
    """A view of this shape to fill: dimensions in any order, gaps, an offset."""
    order = draw(st.permutations(range(len(shape))))
    steps = [draw(st.integers(1, 3)) for _ in shape]
    start = draw(st.integers(0, 3))
    sizes = [max(1, shape[d] * steps[d]) for d in order]
    buffer = torch.zeros(start + math.prod(sizes), dtype=dtype)[start:].view(sizes)
    view = buffer.permute([order.index(d) for d in range(len(shape))])
    for d, (size, step) in enumerate(zip(shape, steps, strict=True)):
        view = view.narrow(d, 0, size * step if size else 0)
        view = view[(slice(None),) * d + (slice(None, None, step),)]
    assert view.shape == shape
    return view


@st.composite
def parameters_and_gradients(
    draw: st.DrawFn,
) -> list[tuple[torch.Tensor, torch.Tensor]]:
    pairs = []
    for _ in range(draw(st.integers(1, 4))):
        shape = tuple(draw(st.lists(st.integers(0, 9), max_size=4)))
        dtype = draw(st.sampled_from(DTYPES))
        seed = draw(st.integers(0, 2**31))
        generator = torch.Generator().manual_seed(seed)
        pair = []
        for _ in range(2):
            view = draw(strided(shape, dtype))
            pair.append(view.copy_(torch.randn(shape, generator=generator)))
        pairs.append((pair[0], pair[1]))
    return pairs


@settings(max_examples=150, deadline=None)
@given(parameters_and_gradients(), scales)
def test_any_shapes_strides_dtypes_and_scales(
    pairs: list[tuple[torch.Tensor, torch.Tensor]], scale: float
) -> None:
    params = [leaf(param) for param, _ in pairs]
    starts = [param.clone() for param, _ in pairs]
    scaled = [gradient.clone() for _, gradient in pairs]
    optimizer = wrap(*params, scale=scale)
    for param, (_, gradient) in zip(params, pairs, strict=True):
        param.grad = gradient
    optimizer.update_master_grads()
    assert not optimizer.overflow
    seen = optimizer.param_groups[0]["params"]
    expected = [unscaled(g, scale) for g in scaled]
    for master, wanted in zip(seen, expected, strict=True):
        assert same_bits(master.grad, wanted)
    norm = optimizer.clip_master_grads(math.inf)
    exact = torch.cat([g.double().flatten() for g in expected])
    assert float(norm) == pytest.approx(
        float(torch.linalg.vector_norm(exact)), rel=NORM_TOLERANCE + 2.0**-24
    )
    optimizer.step()
    for param, start, wanted in zip(params, starts, expected, strict=True):
        moved = (start.to(wanted.dtype) - wanted).to(start.dtype)
        assert same_bits(param.detach(), moved)


@settings(max_examples=100, deadline=None)
@given(
    st.sampled_from(DTYPES),
    st.integers(1, 5000),
    st.data(),
    st.sampled_from([math.inf, -math.inf, math.nan]),
)
def test_any_planted_element_is_found(
    dtype: torch.dtype, length: int, data: st.DataObject, bad: float
) -> None:
    place = data.draw(st.integers(0, length - 1))
    gradient = torch.full((length,), torch.finfo(dtype).max, dtype=dtype)
    assert not take(gradient)[0].overflow
    gradient[place] = bad
    assert take(gradient)[0].overflow


@settings(max_examples=100, deadline=None)
@given(half_types, st.lists(st.floats(width=32, allow_nan=False), min_size=1))
def test_any_master_is_rounded_as_torch_rounds(
    dtype: torch.dtype, values: list[float]
) -> None:
    param = leaf(torch.zeros(len(values), dtype=dtype))
    optimizer = wrap(param)
    (master,) = optimizer.fp32_from_fp16_groups[0]
    with torch.no_grad():
        master.copy_(torch.tensor(values))
    optimizer.step()
    assert same_bits(
        param.detach().view(torch.int16), master.detach().to(dtype).view(torch.int16)
    )
