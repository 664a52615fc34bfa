"""The folder of a run, and checkpoints in it that are whole at every moment.

state/state.json is the checkpoint: it names the files that belong to it, with their sizes and hashes. A new
checkpoint is written to files with new names; then state.json is replaced, in one move; then the old files go. A kill
anywhere leaves either the old state.json with all of its files or the new one with all of its.

One process writes two files, model-N and optimizer-N. Several write a folder, shards-N, with a file each; the whole
model is then put together when the run is done. Either is read by any number of processes.
"""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

from trainshort.common.checks import is_plain_name, is_whole
from trainshort.common.fields import Fields
from trainshort.common.files import free_space, is_full, remove_partials, replacing, sha256, write_json
from trainshort.common.messages import shown
from trainshort.common.reading import file_size, read_json
from trainshort.training.config import TrainConfig

if TYPE_CHECKING:
    from trainshort.training.processes import Processes

FORMAT = "trainshort-run"
VERSION = 1
MODEL, OPTIMIZER, SHARDS = "model", "optimizer", "shards"
ADVICE = "restore it from a copy; nothing was changed"


class Interrupted(KeyboardInterrupt):
    """A run was asked to stop, and has been saved."""

    def __init__(self, folder: Path, step: int, steps: int, number: int) -> None:
        text = f"{folder}: stopped and saved at step {step} of {steps}"
        super().__init__(f"{text}; resume (--resume) goes on from there")
        self.folder, self.step = folder, step
        self.status = 128 + number  # what shells expect of a program that a signal ended


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint whose files were checked: the contents of state.json, and the folder that its tensors are in."""

    state: dict[str, Any]
    folder: Path

    @property
    def step(self) -> int:
        return int(self.state["step"])

    @property
    def is_sharded(self) -> bool:
        """Whether several processes wrote it."""
        return SHARDS in self.state["files"]

    @property
    def model(self) -> Path:
        """The file of the weights, where one process wrote it."""
        return self.folder / str(self.state["files"][MODEL]["name"])

    @cached_property
    def optimizer(self) -> dict[str, Any]:
        """Tensors by name, where one process wrote them."""
        from safetensors import SafetensorError
        from safetensors.torch import load_file

        path = self.folder / self.state["files"][OPTIMIZER]["name"]
        try:
            return load_file(path)
        except SafetensorError as error:
            raise ValueError(f"{path}: not a safetensors file ({error})") from error


class RunFolder:
    def __init__(self, folder: str | Path) -> None:
        self.folder = Path(folder)
        self.state_folder = self.folder / "state"
        self.state_file = self.state_folder / "state.json"
        self._help = f"a run is started with trainshort train --data ... --out {self.folder}"

    def __str__(self) -> str:
        return str(self.folder)

    @property
    def has_config(self) -> bool:
        return (self.folder / "train.json").exists()

    @property
    def has_checkpoint(self) -> bool:
        return self.state_file.exists()

    @property
    def finished(self) -> bool:
        """Whether the run has taken all of its steps and its model is in place."""
        return self.has_checkpoint and bool(self.state().get("finished")) and self._is_published()

    @property
    def step(self) -> int:
        """Of the last checkpoint."""
        return int(self.state()["step"])

    def config(self) -> TrainConfig:
        path = self.folder / "train.json"
        values = read_json(path, self._help)
        try:
            return TrainConfig.from_dict(values)
        except (TypeError, ValueError) as error:
            raise ValueError(f"{path}: {error}") from error

    def started_with(self) -> TrainConfig | None:
        """The config that the run was started with, which nobody edits; None where there is no run yet."""
        if self.has_checkpoint:
            config = self.state()["config"]
            try:
                return TrainConfig.from_dict(config)
            except (TypeError, ValueError) as error:
                raise ValueError(f"{self.state_file}: not a config of this trainshort ({error})") from error
        return self.config() if self.has_config else None

    def write_config(self, config: TrainConfig) -> None:
        write_json(self.folder / "train.json", config.to_dict())

    def state(self) -> dict[str, Any]:
        """state.json, checked to be one."""
        state = read_json(self.state_file, self._help)
        if state.get("format") != FORMAT or state.get("version") != VERSION:
            raise ValueError(f"{self.state_file}: not the state of a run of version {VERSION}; {self._help}")
        _check_state(Fields(state, str(self.state_file), "restore it from a copy, or start another run"))
        return state

    @contextlib.contextmanager
    def locked(self) -> Iterator[None]:
        """One process at a time. The lock goes with its process, however that ends."""
        self.state_folder.mkdir(parents=True, exist_ok=True)
        try:
            import fcntl
        except ImportError:  # not on Windows
            yield
            return
        with _lock_file(self.state_folder / "lock") as file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError as error:
                raise RuntimeError(f"{self.folder}: another process is training in this folder") from error
            for folder in (self.folder, self.state_folder):
                remove_partials(folder)
            self._remove_files_but_of_the_checkpoint()
            try:
                yield
            finally:
                if not self.has_config:  # nothing came of it
                    self._leave_nothing(self.state_folder / "lock")

    def save(self, state: dict[str, Any], model: dict[str, Any], optimizer: dict[str, Any]) -> None:
        """Make this the checkpoint: all of it, or none of it and the one before stays."""
        step = int(state["step"])
        files = {}
        try:
            for kind, tensors in ((MODEL, model), (OPTIMIZER, optimizer)):
                files[kind] = self._write(kind, step, tensors)
            write_json(self.state_file, {"format": FORMAT, "version": VERSION, **state, "files": files})
        except Exception as error:
            self._remove_files_but_of_the_checkpoint()
            if is_full(error):
                raise RuntimeError(self._full(step, model, optimizer)) from error
            raise
        self.publish()

    def save_shards(
        self, state: dict[str, Any], tensors: Mapping[str, Any], model: Collection[str], processes: Processes
    ) -> None:
        """The same, by several processes that hold tensors together. model: the names of the weights among them."""
        from trainshort.training.shards import write_shards

        step = int(state["step"])
        folder = self.state_folder / f"{SHARDS}-{step:08}"
        files: dict[str, Any] = {}
        try:
            processes.by_first(lambda: shutil.rmtree(folder, ignore_errors=True))  # of a process that was killed
            files[SHARDS] = {"name": folder.name, "files": write_shards(tensors, folder, processes)}
            if state["finished"]:
                files[MODEL] = processes.by_first(
                    lambda: self._write(MODEL, step, _read_whole(folder, {name: tensors[name] for name in model}))
                )
            content = {"format": FORMAT, "version": VERSION, **state, "files": files}
            processes.by_first(lambda: write_json(self.state_file, content))
        except Exception as error:
            if processes.is_first:
                self._remove_files_but_of_the_checkpoint()
            if is_full(error):
                raise RuntimeError(self._full(step, tensors)) from error
            raise
        processes.by_first(self.publish)

    def _write(self, kind: str, step: int, tensors: dict[str, Any]) -> dict[str, Any]:
        from trainshort.models.checkpoints.weights import save_weights

        path = self.state_folder / f"{kind}-{step:08}.safetensors"
        with replacing(path) as partial:
            save_weights(tensors, partial)
            return {"name": path.name, "size": partial.stat().st_size, "sha256": sha256(partial)}

    def publish(self) -> None:
        """Make the checkpoint's model the one that `load` finds, and remove files of earlier checkpoints.

        Where its weights are in shards there is none, until the run is done.
        """
        files, target = self.state()["files"], self.folder / "model.safetensors"
        if MODEL not in files:
            target.unlink(missing_ok=True)  # an earlier one would be taken for this
            self._remove_files_but_of_the_checkpoint()
            return
        source = self.state_folder / files[MODEL]["name"]
        try:
            with replacing(target) as partial:
                try:
                    os.link(source, partial)  # takes no space
                except OSError:  # a file system without links
                    partial.write_bytes(source.read_bytes())
        except OSError as error:
            if is_full(error):
                raise RuntimeError(
                    f"{target}: no space left on the disk, but the checkpoint is whole: free some "
                    "space and go on with resume (--resume)"
                ) from error
            raise
        self._remove_files_but_of_the_checkpoint()

    def _is_published(self) -> bool:
        """Whether model.safetensors is the checkpoint's: a kill may have come in between."""
        entry, target = self.state()["files"].get(MODEL), self.folder / "model.safetensors"
        if entry is None or not target.exists():
            return False
        source = self.state_folder / entry["name"]
        return (source.exists() and target.samefile(source)) or sha256(target) == entry["sha256"]

    def load(self, processes: Processes | None = None) -> Checkpoint:
        """The last checkpoint, every byte of it checked: by all processes together, each some of the files."""
        state = self.state()
        files = state["files"]
        if SHARDS in files:
            folder, entries = self.state_folder / files[SHARDS]["name"], files[SHARDS]["files"]
            self._refuse_other_shards(folder, {entry["name"] for entry in entries})
        else:
            folder, entries = self.state_folder, [files[MODEL], files[OPTIMIZER]]
        if processes is None:
            self._verify(folder, entries, state["step"])
        else:
            own = entries[processes.rank :: processes.world]
            processes.together(lambda: self._verify(folder, own, state["step"]))
        return Checkpoint(state, folder)

    def _verify(self, folder: Path, entries: list[dict[str, Any]], step: int) -> None:
        for entry in entries:
            path = folder / entry["name"]
            needed = f"the checkpoint of step {step} needs it: {ADVICE}"
            if (size := file_size(path, needed)) != entry["size"]:
                raise ValueError(f"{path} has {size:,} bytes and should have {entry['size']:,}: it was cut; {ADVICE}")
            if sha256(path) != entry["sha256"]:
                raise ValueError(f"{path} has another sha256 than state.json says: it is damaged; {ADVICE}")

    def _refuse_other_shards(self, folder: Path, named: set[str]) -> None:
        """Files that state.json does not name would be read with the others, unchecked."""
        for path in sorted(folder.glob("*.safetensors")):
            if path.name not in named:
                raise ValueError(f"{path} is not of the checkpoint: remove it; nothing was changed")

    def _remove_files_but_of_the_checkpoint(self) -> None:
        wanted = {entry["name"] for entry in self.state()["files"].values()} if self.has_checkpoint else set()
        for kind in (MODEL, OPTIMIZER):
            for path in self.state_folder.glob(f"{kind}-*.safetensors"):
                if path.name not in wanted:
                    path.unlink(missing_ok=True)
        for path in self.state_folder.glob(f"{SHARDS}-*"):
            if path.name not in wanted:
                shutil.rmtree(path, ignore_errors=True)

    def _leave_nothing(self, lock: Path) -> None:
        lock.unlink(missing_ok=True)
        for folder in (self.state_folder, self.folder):
            with contextlib.suppress(OSError):  # somebody else's files are in it
                folder.rmdir()

    def _full(self, step: int, *parts: Mapping[str, Any]) -> str:
        needed = sum(tensor.nbytes for part in parts for tensor in part.values()) / 2**20
        kept = f"the checkpoint of step {self.step} is whole" if self.has_checkpoint else "there is no checkpoint yet"
        return (
            f"{self.folder}: no space left on the disk for the checkpoint of step {step}, of {needed:,.0f} MB "
            f"({free_space(self.folder)}); {kept}: free some space and go on with resume (--resume)"
        )


def _check_state(state: Fields) -> None:
    """That every entry can be used: numbers against the run's own plan, and names that stay in the folder."""
    config = state.object("config")
    steps = config.whole("steps", 1)
    step = state.whole("step")
    if step > steps:
        raise state.refuse(f"step has to be at most {steps:,}, the steps of the run; got {step:,}")
    if state.flag("finished") != (step == steps):
        raise state.refuse(f"finished is {state.flag('finished')} at step {step:,} of {steps:,}")
    state.number("seconds")
    state.object("environment")
    data = state.object("data")
    data.text("identity")
    for name, about in data.object("files").values.items():
        if not (isinstance(about, list) and len(about) == 2 and all(is_whole(each, 0, 2**63) for each in about)):
            raise data.refuse(f"{shown(name)} has to have a size and a time, got {shown(about)}")
    _check_files(state.object("files"))


def _check_files(files: Fields) -> None:
    """Names of files that one process wrote, or of a folder with files of several."""
    is_sharded = SHARDS in files.values
    for kind in (MODEL,) if is_sharded and MODEL in files.values else () if is_sharded else (MODEL, OPTIMIZER):
        _check_file(files.object(kind), f"{kind}-")
    if is_sharded:
        shards = files.object(SHARDS)
        if not (is_plain_name(name := shards.text("name")) and name.startswith(f"{SHARDS}-")):
            raise shards.refuse(f"name has to be that of a folder beside it, {SHARDS}-N; got {shown(name)}")
        for number, entry in enumerate(shards.list("files")):
            if not isinstance(entry, dict):
                raise shards.refuse(f"files has to list objects, got {shown(entry)}")
            _check_file(Fields(entry, f"{shards.where}: file {number}", shards.what), "shard-")


def _check_file(entry: Fields, prefix: str) -> None:
    name = entry.text("name")
    if not (is_plain_name(name) and name.startswith(prefix) and name.endswith(".safetensors")):
        raise entry.refuse(
            f"name has to be that of a file in the same folder, {prefix}N.safetensors; got {shown(name)}"
        )
    entry.whole("size")
    entry.digest("sha256")


def _read_whole(folder: Path, like: Mapping[str, Any]) -> dict[str, Any]:
    """Tensors of these shapes from the shards of a folder, on the CPU."""
    import torch

    from trainshort.training.shards import read_shards

    whole = {name: torch.empty(tensor.shape, dtype=tensor.dtype) for name, tensor in like.items()}
    read_shards(whole, folder)
    return whole


def _lock_file(path: Path) -> IO[bytes]:
    """Opened for writing and left as it is; a link is refused: what it leads to is not ours."""
    try:
        return os.fdopen(
            os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK, 0o666), "wb", buffering=0
        )
    except OSError as error:
        if error.errno in (errno.ELOOP, errno.EISDIR, errno.ENXIO):
            raise ValueError(f"{path}: not a file of ours but a link, a folder or a pipe: remove it") from error
        raise
