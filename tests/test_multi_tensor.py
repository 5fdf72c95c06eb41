"""apex' multi_tensor_apply and amp_C, on the core's list kernels."""

from typing import Any

import pytest
import torch

from fp16core import multi_tensor as mt
from helpers import HALF_DTYPES, INF, NAN

DTYPES = [*HALF_DTYPES, torch.float32]


def flag() -> torch.Tensor:
    return torch.zeros(1, dtype=torch.int32)


def tensors(dtype: torch.dtype, seed: int = 0) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    shapes = [(3, 5), (0,), (1,), (70_001,)]
    made = [torch.randn(s, generator=generator).to(dtype) for s in shapes]
    return [made[0].t().contiguous().t(), *made[1:]]


def zeros(dtype: torch.dtype) -> list[torch.Tensor]:
    return [torch.zeros(t.shape, dtype=dtype) for t in tensors(dtype)]


@pytest.mark.parametrize("source", DTYPES)
@pytest.mark.parametrize("target", DTYPES)
def test_scale(source: torch.dtype, target: torch.dtype) -> None:
    noop, lists = flag(), [tensors(source), zeros(target)]
    assert mt.multi_tensor_applier(mt.multi_tensor_scale, noop, lists, 0.3) is None
    factor = torch.tensor(0.3)  # as float32
    for given, got in zip(*lists, strict=True):
        assert torch.equal(got, (given.float() * factor).to(target))
    assert noop.item() == 0


@pytest.mark.parametrize("bad", [INF, -INF, NAN])
@pytest.mark.parametrize("dtype", DTYPES)
def test_scale_flags_what_it_reads(dtype: torch.dtype, bad: float) -> None:
    noop, source = flag(), tensors(dtype)
    source[3][69_999] = bad
    target = zeros(torch.float32)
    mt.multi_tensor_scale(65536, noop, [source, target], 0.5)
    assert noop.item() == 1
    assert torch.equal(target[0], source[0].float() / 2), "written all the same"
    # An overflow of the result alone is none.
    noop = flag()
    mt.multi_tensor_scale(
        1, noop, [[torch.full((2,), 4e4)], [torch.zeros(2).half()]], 2.0
    )
    assert noop.item() == 0


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("check", "flags"), [(-1, (1, 1)), (0, (1, 0)), (1, (0, 1))])
def test_axpby(dtype: torch.dtype, check: int, flags: tuple[int, int]) -> None:
    noop, x, y, out = flag(), tensors(dtype), tensors(dtype, 1), zeros(dtype)
    mt.multi_tensor_axpby(1, noop, [x, y, out], 0.5, -2.0, check)
    for a, b, got in zip(x, y, out, strict=True):
        # 0.5 x - 2 y is exact in float64, and is rounded twice here.
        want = (a.double() * 0.5 - b.double() * 2).float().to(dtype)
        assert torch.equal(got, want)
    assert noop.item() == 0
    for dirty, raised in zip((x, y), flags, strict=True):
        noop = flag()
        dirty[2][0], kept = INF, dirty[2].clone()
        mt.multi_tensor_axpby(1, noop, [x, y, out], 1.0, 1.0, check)
        assert noop.item() == raised
        dirty[2].copy_(kept)


@pytest.mark.parametrize("dtype", DTYPES)
def test_norms(dtype: torch.dtype) -> None:
    noop, values = flag(), tensors(dtype)
    wanted = [t.double().norm().item() for t in values]
    total, each = mt.multi_tensor_l2norm(1, noop, [values], True)
    assert total.shape == (1,)
    # Sums in double, rounded to float32 once.
    torch.testing.assert_close(each, torch.tensor(wanted), rtol=2e-7, atol=0)
    whole = torch.tensor(wanted).double().norm().float()
    torch.testing.assert_close(total[0], whole, rtol=2e-7, atol=0)
    assert mt.multi_tensor_l2norm(1, noop, [values])[1].numel() == 0
    inv = torch.tensor([0.25])
    unscaled, _ = mt.multi_tensor_unscale_l2norm(1, noop, [values], inv, False)
    torch.testing.assert_close(unscaled, total / 4, rtol=2e-7, atol=0)
    target = zeros(torch.float32)
    scaled, _ = mt.multi_tensor_l2norm_scale(1, noop, [values, target], 0.5, False)
    assert torch.equal(scaled, total)
    assert torch.equal(target[3], values[3].float() / 2)
    assert noop.item() == 0


def test_norms_flag_elements_and_not_sums() -> None:
    noop = flag()
    total, _ = mt.multi_tensor_l2norm(1, noop, [[torch.full((4,), 1e20)]])
    assert (noop.item(), total.item()) == (0, pytest.approx(2e20))
    mt.multi_tensor_l2norm(1, noop, [[torch.tensor([NAN])]])
    assert noop.item() == 1
    total, each = mt.multi_tensor_l2norm_mp(1, noop, [[torch.ones(3)]], True)
    assert (total.item(), each.tolist()) == (0.0, [0.0])
    total, _ = mt.multi_tensor_l2norm_mp(1, flag(), [[torch.ones(4)]])
    assert total.item() == 2.0


@pytest.mark.parametrize(
    ("op", "lists", "args", "rule"),
    [
        (mt.multi_tensor_scale, [[]], (1.0,), "must be 2 lists, but got 1"),
        (
            mt.multi_tensor_scale,
            [[torch.ones(2)], [torch.ones(3)]],
            (1.0,),
            r"tensors of equal sizes, but got \[\[2\], \[3\]\]",
        ),
        (
            mt.multi_tensor_axpby,
            [[torch.ones(1)]] * 3,
            (1.0, 1.0, 2),
            "arg_to_check must be -1, 0 or 1, but got 2",
        ),
    ],
)
def test_lists_that_do_not_fit_are_refused(
    op: Any, lists: Any, args: Any, rule: str
) -> None:
    with pytest.raises(ValueError, match=rule):
        op(1, flag(), lists, *args)


def test_the_applier_looks_like_the_original() -> None:
    applier = mt.MultiTensorApply(7)
    applier.check_avail()
    assert applier.available
    assert applier.chunk_size == 7
    assert applier(lambda *args: args, flag(), [], 3) == (7, flag(), [], 3)
    assert mt.multi_tensor_applier.chunk_size == 65536


def test_the_scale_in_tensors_moves_in_place() -> None:
    scale, found = torch.tensor([8.0]), torch.ones(1)
    growth = torch.zeros(1, dtype=torch.int32)
    hysteresis = torch.full((1,), 2, dtype=torch.int32)
    for want in (8.0, 4.0, 2.0):
        got = mt.update_scale_hysteresis(
            scale, growth, hysteresis, found, 2.0, 0.5, 2, 2
        )
        assert got is scale
        assert scale.item() == want
    for want in (2.0, 4.0):
        mt.update_scale_hysteresis(
            scale, growth, hysteresis, torch.zeros(1), 2.0, 0.5, 2, 2
        )
        assert (scale.item(), hysteresis.item()) == (want, 2)


def test_tensors_of_equal_size_may_have_other_shapes() -> None:
    given, got = torch.arange(6.0).half(), torch.zeros(2, 3)
    mt.multi_tensor_scale(1, flag(), [[given], [got]], 2.0)
    assert got.tolist() == [[0.0, 2.0, 4.0], [6.0, 8.0, 10.0]]
    mt.multi_tensor_axpby(1, flag(), [[given], [got], [got]], 1.0, 0.5, -1)
    assert torch.equal(got.flatten(), given.float() * 2)


def test_other_shapes_need_contiguous_tensors() -> None:
    got = torch.zeros(3, 2).t()
    with pytest.raises(
        ValueError,
        match=r"multi_tensor_scale: tensors of equal size must be contiguous or have "
        r"the same shape, but got \[6\] and \[2, 3\]",
    ):
        mt.multi_tensor_scale(1, flag(), [[torch.ones(6)], [got]], 2.0)
    assert not got.any()
