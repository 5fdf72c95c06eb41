"""Several processes that stay alive and run functions of the tests together."""

import contextlib
import datetime
import logging
import multiprocessing
import os
import pathlib
import time
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection, wait
from typing import Any

import torch
import torch.distributed as dist

# No collective of these tests takes a second. One that waits for ever fails after
# this many, and the pool gives up on its processes somewhat later.
SECONDS = 20
PATIENCE = 3 * SECONDS


class Ranks:
    """What a function in a process is told: its rank, and groups it belongs to."""

    def __init__(self, rank: int, size: int) -> None:
        self.rank = rank
        self.size = size
        self.all = dist.group.WORLD
        # All processes have to make all groups, in the same order.
        made = {
            ranks: dist.new_group(ranks)
            for ranks in [(i, i + 1) for i in range(0, size, 2)]
            + [(i, i + size // 2) for i in range(size // 2)]
        }
        # A process and its neighbour, and a process and the one half a pool away.
        self.neighbours, self.strangers = (
            group for ranks, group in made.items() if rank in ranks
        )
        self.others = [group for ranks, group in made.items() if rank not in ranks]


def _serve(rank: int, size: int, store: str, pipe: Connection) -> None:
    torch.set_num_threads(1)
    logging.getLogger("fp16core").setLevel(logging.ERROR)
    dist.init_process_group(
        "gloo",
        init_method=f"file://{store}",
        rank=rank,
        world_size=size,
        timeout=datetime.timedelta(seconds=SECONDS),
    )
    ranks = Ranks(rank, size)
    while True:
        try:
            function, args, last = pipe.recv()
        except EOFError:
            return
        torch.manual_seed(rank)
        try:
            pipe.send((True, function(ranks, *args)))
        except BaseException:
            pipe.send((False, traceback.format_exc()))
        if last:
            os._exit(0)


class ProcessPool:
    """``size`` processes in one group of gloo, started when first needed.

    Nothing hangs: after a failure the processes are killed, and started anew for
    the next function.
    """

    def __init__(self, size: int, folder: pathlib.Path) -> None:
        self._size = size
        self._folder = folder
        self._starts = 0
        self._workers: list[tuple[Any, Connection]] = []

    def run(self, function: Callable[..., Any], *args: Any) -> list[Any]:
        """Run ``function(ranks, *args)`` in all processes; return what each returned.

        Fails with the tracebacks if it raises in one of them. What it returns must
        be plain data: tensors go as lists or numpy arrays.
        """
        answers = self._run(function, args, last=False)
        assert None not in answers, f"processes died: {answers}"
        return answers

    def run_last(self, function: Callable[..., Any], *args: Any) -> list[Any]:
        """Run like :meth:`run`; processes end when they have answered, as scripts do.

        None is the answer of a process that died before.
        """
        answers = self._run(function, args, last=True)
        self.close()
        return answers

    def _run(
        self, function: Callable[..., Any], args: tuple[Any, ...], last: bool
    ) -> list[Any]:
        if not self._workers:
            self._start()
        for _, pipe in self._workers:
            pipe.send((function, args, last))
        answers: dict[int, Any] = {}
        errors: dict[int, str] = {}
        end = time.monotonic() + PATIENCE
        waiting = {pipe: rank for rank, (_, pipe) in enumerate(self._workers)}
        while waiting and time.monotonic() < end:
            for pipe in wait(list(waiting), timeout=max(0.0, end - time.monotonic())):
                assert isinstance(pipe, Connection)
                rank = waiting.pop(pipe)
                try:
                    fine, answer = pipe.recv()
                except (EOFError, ConnectionError):
                    fine, answer = True, None
                (answers if fine else errors)[rank] = answer
            if errors:
                # The others may wait for one that failed.
                end = min(end, time.monotonic() + 5)
        if waiting or errors or None in answers.values():
            self.close()
        told = "\n".join(f"In process {rank}:\n{text}" for rank, text in errors.items())
        late = sorted(waiting.values())
        assert not errors and not late, f"{told}\nprocesses without an answer: {late}"
        return [answers[rank] for rank in range(self._size)]

    def _start(self) -> None:
        self._starts += 1
        store = self._folder / f"store-{self._starts}"
        # The processes are forks of a server that has imported torch, and what the
        # first optimizer imports: on few cores several times faster than an import
        # in each.
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(["torch.distributed", "torch._dynamo"])
        for rank in range(self._size):
            ours, theirs = context.Pipe()
            process = context.Process(
                target=_serve, args=(rank, self._size, str(store), theirs), daemon=True
            )
            process.start()
            theirs.close()
            self._workers.append((process, ours))

    def close(self) -> None:
        """End the processes."""
        for process, pipe in self._workers:
            pipe.close()
            with contextlib.suppress(ProcessLookupError):
                process.kill()
        for process, _ in self._workers:
            process.join(10)
        self._workers = []
