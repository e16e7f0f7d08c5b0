"""Many runs, several at once: processes that take one job after the other, so that starting one (torch, a CUDA context)
is paid once and not for every run.

What a run says goes to `log` in its folder. One that fails, or whose process dies, stops no other; its process ends
with it, since a broken CUDA context would break the next. Jobs whose JSON is there are not repeated. Ctrl-C lets every
run write a checkpoint, and the same command goes on.
"""

from __future__ import annotations

import io
import multiprocessing
import os
import signal
import sys
import time
import traceback
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from multiprocessing.connection import Connection, wait
from pathlib import Path
from threading import Thread

import torch

from titanmem.bench.job import Job
from titanmem.config import require

DONE, STOPPED, FAILED = "done", "stopped", "failed"


def run_jobs(jobs: Sequence[Job], parallel: int) -> list[str]:
    """All that have no JSON yet, the longest first; returns the names of those that failed."""
    from tqdm import tqdm

    require(parallel >= 1, f"--parallel is a number of runs, got {parallel}")
    waiting = sorted((job for job in jobs if not job.done()), key=lambda job: -job.weight)
    print(f"{len(jobs)} runs, {len(jobs) - len(waiting)} are there already", flush=True)
    if not waiting:
        return []
    parallel = min(parallel, len(waiting))
    steps, failed = {job.name: job.steps for job in waiting}, []
    pause = 0.5 if sys.stderr.isatty() else 30
    bar = tqdm(total=sum(steps.values()), unit="step", dynamic_ncols=True, smoothing=0.05, mininterval=pause)
    seen, said = dict.fromkeys(steps, 0), time.monotonic()

    def advance(job: Job, step: int) -> None:
        bar.update(step - seen[job.name])
        seen[job.name] = step

    idle: list[Worker] = []
    busy: list[Worker] = []
    with interruptible():
        try:
            while waiting or busy:
                while waiting and len(busy) < parallel:
                    worker = idle.pop() if idle else Worker(parallel)
                    busy.append(worker)
                    worker.take(waiting.pop(0))
                while idle:  # no job is left for them
                    idle.pop().end()
                tested = sum(seen[worker.job.name] == steps[worker.job.name] for worker in busy)
                testing = f", {tested} of them in the tests" if tested else ""
                bar.set_postfix_str(f"{len(busy)} running{testing}, {len(waiting)} waiting", refresh=False)
                if time.monotonic() - said > pause:  # steps alone would leave long tests silent
                    said = time.monotonic()
                    bar.refresh()
                ready = wait([worker.pipe for worker in busy], timeout=1)
                for worker in list(busy):
                    if worker.pipe not in ready:
                        advance(worker.job, worker.job.step())
                        continue
                    busy.remove(worker)
                    word, text = worker.answer()
                    advance(worker.job, steps[worker.job.name])  # patience may have ended it before
                    bar.write(f"{worker.job.name}: {text}", file=sys.stdout)
                    sys.stdout.flush()
                    if word == DONE:
                        idle.append(worker)
                    else:
                        worker.end()
                        failed.append(worker.job.name)
        except KeyboardInterrupt:
            bar.write("stopping: every run writes a checkpoint; the same command goes on")
            raise
        finally:
            for worker in busy:
                worker.process.terminate()
            for worker in (*busy, *idle):
                worker.end()
            bar.close()
    return failed


class Worker:
    """A process, and the job it has."""

    job: Job

    def __init__(self, beside: int) -> None:
        context = multiprocessing.get_context("spawn")
        self.pipe, theirs = context.Pipe()
        self.process = context.Process(target=work, args=(theirs, beside))
        held = signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for this process, which ends the others
        try:
            self.process.start()
        finally:
            signal.signal(signal.SIGINT, held)
        theirs.close()

    def take(self, job: Job) -> None:
        self.job = job
        with suppress(BrokenPipeError):  # it is gone, as `answer` will find
            self.pipe.send(job)

    def answer(self) -> tuple[str, str]:
        """How the job ended, and what to say about it."""
        try:
            word, text = self.pipe.recv()
        except (EOFError, ConnectionResetError):
            self.process.join()
            word, text = FAILED, f"its process ended with {self.process.exitcode}"
        return word, text if word == DONE else f"{word}: {text}; see {self.job.folder / 'log'}"

    def end(self) -> None:
        self.pipe.close()
        self.process.join()


def work(pipe: Connection, beside: int) -> None:
    """The life of a worker: jobs come in, how they ended goes out, until one fails or no more come."""
    Thread(target=follow, args=(os.getppid(),), daemon=True).start()
    if "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(max(1, (os.cpu_count() or 1) // beside))
    word = DONE
    while word == DONE:
        try:
            job: Job = pipe.recv()
        except (EOFError, ConnectionResetError):
            return
        try:
            say_into(job.folder / "log")
            clean()
            record = job.run(beside)
            word, text = (STOPPED, "by a signal") if record is None else (DONE, job.brief(record))
        except Exception as error:
            traceback.print_exc()
            word, text = FAILED, f"{type(error).__name__}: {error}"
        with suppress(BrokenPipeError):
            pipe.send((word, text))


def follow(parent: int) -> None:
    """Where the process that gives the jobs is gone, this one ends as by a SIGTERM: with a checkpoint, and not unseen
    beside the next."""
    while os.getppid() == parent:
        time.sleep(1)
    os.kill(os.getpid(), signal.SIGTERM)


def say_into(log: Path) -> None:
    """All that this process says from now on goes there."""
    log.parent.mkdir(parents=True, exist_ok=True)
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(line_buffering=True)  # in order with what goes to stderr, and at once
    file = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    for number in (1, 2):
        os.dup2(file, number)
    os.close(file)


def clean() -> None:
    """What the job before left in this process: memory of the GPU, and what was compiled for its shapes."""
    if "torch._dynamo" in sys.modules:
        torch.compiler.reset()
    if torch.cuda.is_initialized():
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()


@contextmanager
def interruptible() -> Iterator[None]:
    """SIGTERM is a Ctrl-C too, and both are heard in background jobs, which begin with them ignored."""
    numbers = (signal.SIGINT, signal.SIGTERM)
    before = [signal.signal(number, signal.default_int_handler) for number in numbers]
    try:
        yield
    finally:
        for number, handler in zip(numbers, before, strict=True):
            signal.signal(number, handler)
