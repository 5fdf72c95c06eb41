"""Asserts that all contestants do the same, so that nobody is timed for less."""

from collections.abc import Collection, Mapping, Sequence

import torch
from bare_pass import Prepared
from contestant import MAX_NORM, Contestant
from torch import Tensor


def check_iteration(
    contestants: Mapping[str, Contestant],
    given: list[Tensor],
    exact: Collection[str] = (),
) -> None:
    """Runs one iteration and asserts that all contestants hold the same masters
    afterwards: those in ``exact`` the same bits, the others nearly. All must have
    had the same iterations before."""
    reference: list[Tensor] = []
    for name in sorted(contestants, key=lambda name: name not in exact):
        contestant = contestants[name]
        before = [master.detach().clone() for master in contestant.masters]
        contestant.backward(given)
        contestant.take()
        wanted = min(norm(contestant.master_gradients()), MAX_NORM)
        contestant.clip()
        # torch sums a tensor's squares in fp32: of 38 M elements the norm is off by
        # 0.3 %. Everybody does the same work all the same.
        off = abs(norm(contestant.master_gradients()) - wanted)
        expect(off <= 0.01 * wanted, name, f"the clipped norm is off by {off}")
        contestant.step()
        contestant.zero_grad()
        after = [master.detach() for master in contestant.masters]
        expect(not same_bits(before, after), name, "the step moved no master")
        reference = reference or after
        if name in exact:
            expect(same_bits(after, reference), name, "masters differ")
        else:
            near = distance(after, reference) <= 0.01 * distance(after, before)
            expect(near, name, "masters differ")
        rounded = [
            master.to(weight.dtype)
            for master, weight in zip(after, contestant.model, strict=True)
        ]
        expect(same_bits(contestant.model, rounded), name, "the model is stale")
        left = [*contestant.gradients, *contestant.master_gradients()]
        expect(not any(g.any() for g in left), name, "a gradient is not zeroed")


def check_bare_pass(
    function: str, prepared: Prepared, operands: Sequence[Sequence[Tensor]]
) -> None:
    """Asserts that a bare pass moves every element of ``operands``, lists of bits that
    pair up: int16 for halves and int32 for singles."""
    before = [[tensor.clone() for tensor in operand] for operand in operands]
    prepared.run()
    if function == "read_halves":
        total = sum(int(tensor.sum(dtype=torch.int64)) for tensor in before[0])
        expect(
            prepared.sum_read() == total % 2**16, function, "an element was not read"
        )
    for now, was in zip(
        zip(*operands, strict=True), zip(*before, strict=True), strict=True
    ):
        same = all(map(torch.equal, now, moved(function, was)))
        expect(same, function, "an element was not moved")


def moved(function: str, before: Sequence[Tensor]) -> Sequence[Tensor]:
    """Returns what a bare pass leaves, in the order of the operands."""
    if function == "read_halves":
        return before
    if function == "widen_halves":
        return [before[0], widen(before[0])]
    if function == "narrow_singles":
        return [before[0], narrow(before[0])]
    if function == "flip_singles":
        return [~before[0]]
    if function == "zero_halves":
        return [torch.zeros_like(before[0])]
    kind, rule = function.split("_")
    weight, *moments = before[1 : {"sgd": 3, "adam": 4}[rule]]
    after = [before[0], *moments, widen(before[0]) ^ weight]
    return after if kind == "step" else [*after, narrow(weight)]


def widen(bits: Tensor) -> Tensor:
    return bits.int() << 16 if bits.dtype is torch.int16 else bits


def narrow(bits: Tensor) -> Tensor:
    return (bits >> 16).to(torch.int16)


def norm(gradients: list[Tensor]) -> float:
    """Returns the 2-norm, summed in float64."""
    norms = [torch.linalg.vector_norm(g, dtype=torch.float64) for g in gradients]
    return float(torch.linalg.vector_norm(torch.stack(norms)))


def distance(some: list[Tensor], others: list[Tensor]) -> float:
    """Returns the largest difference between two elements."""
    return max(float((a - b).abs().max()) for a, b in zip(some, others, strict=True))


def same_bits(some: Sequence[Tensor], others: Sequence[Tensor]) -> bool:
    """Returns whether finite tensors are equal in every bit."""
    kinds = {2: torch.int16, 4: torch.int32}
    return all(
        torch.equal(
            a.detach().view(kinds[a.element_size()]),
            b.detach().view(kinds[b.element_size()]),
        )
        for a, b in zip(some, others, strict=True)
    )


def expect(condition: bool, name: str, fault: str) -> None:
    if not condition:
        raise AssertionError(f"{name}: {fault}")
