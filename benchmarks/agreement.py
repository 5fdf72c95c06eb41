"""Asserts that all contestants do the same, so that nobody is timed for less."""

import torch
from contestants import MAX_NORM, Contestant
from torch import Tensor


def check_iteration(contestants: dict[str, Contestant]) -> None:
    """Runs one iteration, which must not clip, and asserts that all contestants hold
    the same bits afterwards. All must be fresh, and have the same inner optimizer."""
    reference: list[Tensor] | None = None
    for name, contestant in contestants.items():
        before = [master.detach().clone() for master in contestant.masters]
        contestant.put_gradients_back()
        contestant.finish_iteration()
        after = [master.detach() for master in contestant.masters]
        reference = reference or after
        expect(not same_bits(before, after), name, "the step moved no master")
        expect(same_bits(after, reference), name, "masters differ")
        rounded = [master.half() for master in after]
        expect(same_bits(contestant.model, rounded), name, "the model is stale")
        for tensor in [*contestant.model, *contestant.masters]:
            expect(not tensor.grad.any(), name, "a gradient is not zeroed")


def check_clipping(contestants: dict[str, Contestant]) -> None:
    """Asserts that all contestants clip gradients whose norm is above MAX_NORM."""
    for name, contestant in contestants.items():
        contestant.put_gradients_back()
        contestant.take()
        expect(norm(contestant.masters) > MAX_NORM, name, "nothing to clip")
        contestant.clip()
        # The norm may be summed in fp32, in any order, over chunks of any size.
        off = abs(norm(contestant.masters) / MAX_NORM - 1)
        expect(off < 1e-4, name, f"the clipped norm is off by {off}")


def check_bare_pass(sources: list[Tensor], targets: list[Tensor]) -> None:
    """Asserts that a bare pass has moved every element of ``sources``."""
    for source, target in zip(sources, targets, strict=True):
        narrow, wide = sorted((source, target), key=Tensor.element_size)
        moved = wide.detach().view(torch.int32) >> 16
        arrived = torch.equal(moved.to(torch.int16), narrow.detach().view(torch.int16))
        expect(arrived, "bare pass", "an element was not moved")


def norm(masters: list[Tensor]) -> float:
    """Returns the 2-norm of the gradients, computed in float64."""
    return sum(m.grad.double().square().sum().item() for m in masters) ** 0.5


def same_bits(some: list[Tensor], others: list[Tensor]) -> bool:
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
