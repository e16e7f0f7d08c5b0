"""Checkpoints: torch's distributed checkpoint, made atomic and checkable.

    RUN/checkpoints/step-00000500.part   being written
    RUN/checkpoints/step-00000500        complete: every file is on the disk and listed with its hash in manifest.json

A folder is renamed only after everything in it was synced, so whatever has the final name is whole. Writing happens
beside the training, from a copy. Loading checks every file first. Ranks may differ between saving and loading.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import math
import os
import shutil
import warnings
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import async_save

from titanmem.state import ModelState
from titanmem.train.parallel import Ranks, Spread

MANIFEST = "manifest.json"


class CheckpointError(ValueError):
    """A checkpoint that cannot be written or read; the text names the file and what to do."""


class Checkpoints:
    """The checkpoints of one run."""

    def __init__(self, run: Path, ranks: Ranks, keep: int) -> None:
        self.folder, self.ranks, self.keep = run / "checkpoints", ranks, keep
        self.writer = ThreadPoolExecutor(1, "checkpoint")
        self.pending: Future[None] | None = None

    # -- writing --------------------------------------------------------------------------------------------------

    def save(
        self,
        step: int,
        spread: Spread,
        optimizer: torch.optim.Optimizer,
        progress: Mapping[str, Any],
        lanes: Sequence[ModelState],
        wait: bool = False,
    ) -> None:
        """Write a checkpoint in the background (`wait`: now). `progress` is small and JSON-like; `lanes` are carried
        memories of this rank's rows."""
        self.wait()
        aside = self.folder / f"{name_of(step)}.part"
        self._begin(aside)
        try:
            if lanes:
                ModelState.stack([s.detach() for s in lanes]).save(aside / f"lanes-{self.ranks.rank:05d}.safetensors")
            model, optim = get_state_dict(spread.module, optimizer)
            held = {"model": _copy(model), "optim": _copy(optim)}
            done = async_save(
                held,
                storage_writer=FileSystemWriter(aside),
                process_group=self.ranks.side,
            )
        except (OSError, CheckpointException) as error:
            raise self._failed(aside, error) from error
        assert isinstance(done, Future)
        self.pending = self.writer.submit(self._finish, done, aside, dict(progress, step=step))
        if wait:
            self.wait()

    def wait(self) -> None:
        """Until the last checkpoint is complete on every rank."""
        if self.pending is not None:
            pending, self.pending = self.pending, None
            pending.result()

    def settle(self) -> None:
        """Whatever ended the run, a checkpoint that is being written is finished."""
        with contextlib.suppress(CheckpointError):
            self.wait()

    def _begin(self, aside: Path) -> None:
        if self.ranks.first:
            shutil.rmtree(aside, ignore_errors=True)  # what a killed run left
            try:
                aside.mkdir(parents=True)
            except OSError as error:
                raise self._failed(aside, error) from error
        self.ranks.barrier()

    def _finish(self, done: Future[Any], aside: Path, progress: dict[str, Any]) -> None:
        """Wait for all ranks' files, sync them, list them, and give the folder its name."""
        try:
            done.result()
            if not self.ranks.first:
                return
            files = {path.name: describe(path) for path in sorted(aside.iterdir())}
            manifest = aside / MANIFEST
            manifest.write_text(json.dumps({"progress": progress, "files": files}, indent=1))
            for path in (*(aside / name for name in files), manifest, aside):
                sync(path)
            final = aside.with_suffix("")
            if final.exists():  # an earlier try from before a resume: never overwritten, only set aside
                final.rename(final.with_suffix(f".old-{os.getpid()}"))
            aside.rename(final)
            sync(self.folder)
        except (OSError, CheckpointException, RuntimeError) as error:
            raise self._failed(aside, error) from error
        self._prune()

    def _prune(self) -> None:
        """Keep the newest and the best; one whose manifest cannot be read is left alone."""
        complete, best = [path for path in self.named() if has_manifest(path)], self.best()
        for path in complete[: -self.keep]:
            if path != best:
                gone = path.with_suffix(".gone")
                path.rename(gone)  # so that a kill in the middle leaves nothing that looks complete
                shutil.rmtree(gone)

    def _failed(self, aside: Path, error: BaseException) -> CheckpointError:
        complete = self.named()
        good = f"the last complete one is {complete[-1]}" if complete else "there is no complete one yet"
        return CheckpointError(
            f"could not write the checkpoint {aside}: {_reason(error)}. Nothing was overwritten; {good}. Make room (or "
            "raise the limit) and run the same command again to resume"
        )

    # -- reading --------------------------------------------------------------------------------------------------

    def named(self) -> list[Path]:
        """The checkpoints, oldest first: each was complete when it got its name."""
        return sorted(self.folder.glob("step-????????"))

    def best(self) -> Path | None:
        """The checkpoint with the lowest held-out loss, if any was evaluated."""
        return best_of([path for path in self.named() if has_manifest(path)])

    def set_aside(self, after: Path) -> None:
        """Rename the checkpoints later than `after`: what is trained from there replaces them."""
        for path in self.named():
            if step_of(path) > step_of(after):
                path.rename(path.with_suffix(f".old-{os.getpid()}"))

    def clear(self) -> None:
        """Remove what killed runs left half written or half removed."""
        for kind in ("part", "gone"):
            for path in self.folder.glob(f"step-*.{kind}"):
                shutil.rmtree(path, ignore_errors=True)

    def choose(self, step: int | None = None) -> Path | None:
        """The newest checkpoint, or that of a step; checked file by file."""
        complete = self.named()
        if step is not None:
            wanted = self.folder / name_of(step)
            if wanted not in complete:
                have = ", ".join(str(step_of(path)) for path in complete) or "none"
                raise CheckpointError(f"no complete checkpoint of step {step} in {self.folder}; there are: {have}")
            complete = complete[: complete.index(wanted) + 1]
        if not complete:
            return None
        trouble = check(complete[-1])
        if trouble is None:
            return complete[-1]
        for older in reversed(complete[:-1]):
            if check(older) is None:
                way = f"the previous good one is {older}: resume from it with --from {step_of(older)}"
                break
        else:
            way = "no earlier checkpoint is good either; start a new run with another --out"
        raise CheckpointError(f"the checkpoint {complete[-1]} is damaged: {trouble}. Nothing was changed; {way}")

    def load(self, path: Path, spread: Spread, optimizer: torch.optim.Optimizer) -> tuple[dict[str, Any], list[Path]]:
        """Fill model and optimiser; returns the progress and the files of carried memories."""
        model, optim = get_state_dict(spread.module, optimizer)
        held: dict[str, Any] = {"model": model, "optim": optim}
        load(held, checkpoint_id=path, process_group=self.ranks.side)
        set_state_dict(spread.module, optimizer, model_state_dict=held["model"], optim_state_dict=held["optim"])
        return read_manifest(path)["progress"], sorted(path.glob("lanes-*.safetensors"))


def load_weights(path: Path, model: torch.nn.Module) -> None:
    """Fill one process's model from a checkpoint, without ranks."""
    held = {"model": model.state_dict()}
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")
        load(held, checkpoint_id=path, no_dist=True)
    model.load_state_dict(held["model"])


def name_of(step: int) -> str:
    return f"step-{step:08d}"


def step_of(path: Path) -> int:
    return int(path.name.removeprefix("step-"))


def read_manifest(path: Path) -> dict[str, Any]:
    """What a complete checkpoint says about itself."""
    try:
        found: dict[str, Any] = json.loads((path / MANIFEST).read_text())
    except (OSError, json.JSONDecodeError) as error:
        raise CheckpointError(f"{path / MANIFEST} cannot be read: {error}") from error
    return found


def has_manifest(path: Path) -> bool:
    try:
        return "progress" in read_manifest(path)
    except CheckpointError:
        return False


def best_of(paths: Sequence[Path]) -> Path | None:
    """The checkpoint with the lowest held-out loss of its own step; of equal ones the earliest."""
    losses = {path: read_manifest(path)["progress"].get("held_out") for path in paths}
    scored = {path: loss for path, loss in losses.items() if loss is not None and math.isfinite(loss)}
    return min(scored, key=lambda path: scored[path]) if scored else None


def check(path: Path) -> str | None:
    """What is wrong with a checkpoint, naming the file; None if nothing is."""
    try:
        files = read_manifest(path)["files"]
    except CheckpointError as error:
        return str(error)
    except (KeyError, TypeError):
        return f"{path / MANIFEST} does not list its files"
    for name, expected in files.items():
        file = path / name
        if not file.exists():
            return f"{file} is missing"
        if file.stat().st_size != expected["bytes"]:
            return f"{file} has {file.stat().st_size} bytes instead of {expected['bytes']}"
        if describe(file) != expected:
            return f"{file} has another sha256 than when it was written"
    return None


def describe(path: Path) -> dict[str, Any]:
    """Size and hash of a file."""
    with path.open("rb") as file:
        return {"bytes": path.stat().st_size, "sha256": hashlib.file_digest(file, "sha256").hexdigest()}


def sync(path: Path) -> None:
    """Make a file or a folder's entries survive a crash of the machine."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _copy(tree: Any) -> Any:
    """A copy that training cannot change while it is being written. Tensors of a GPU are copied by torch itself."""
    if isinstance(tree, Tensor):
        return tree.clone() if tree.device.type == "cpu" else tree
    if isinstance(tree, dict):
        return {key: _copy(value) for key, value in tree.items()}
    return tree


def _reason(error: BaseException) -> str:
    """The innermost readable cause: torch wraps the errors of all ranks."""
    if isinstance(error, CheckpointException):
        causes = [failure[0] if isinstance(failure, tuple) else failure for failure in error.failures.values()]
        error = causes[0] if causes else error
    while error.__cause__ is not None:
        error = error.__cause__
    if isinstance(error, OSError) and error.strerror:
        return f"{error.filename}: {error.strerror}" if error.filename else error.strerror
    return str(error).strip().splitlines()[-1] if str(error).strip() else type(error).__name__
