"""The folder of a run, and checkpoints in it that are whole at every moment.

state/state.json is the checkpoint: it names the files that belong to it, with their sizes and hashes. A new
checkpoint is written to files with new names; then state.json is replaced, in one move; then the old files go. A kill
anywhere leaves either the old state.json with all of its files or the new one with all of its.
"""

from __future__ import annotations

import contextlib
import errno
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from trainshort.common.checks import is_plain_name, is_whole
from trainshort.common.fields import Fields
from trainshort.common.files import free_space, is_full, remove_partials, replacing, sha256, write_json
from trainshort.common.messages import shown
from trainshort.common.reading import file_size, read_json
from trainshort.training.config import TrainConfig

FORMAT = "trainshort-run"
VERSION = 1
MODEL, OPTIMIZER = "model", "optimizer"


class Interrupted(KeyboardInterrupt):
    """A run was asked to stop, and has been saved."""

    def __init__(self, folder: Path, step: int, steps: int, number: int) -> None:
        text = f"{folder}: stopped and saved at step {step} of {steps}"
        super().__init__(f"{text}; resume (--resume) goes on from there")
        self.folder, self.step = folder, step
        self.status = 128 + number  # what shells expect of a program that a signal ended


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint as it was read: the contents of state.json, and tensors by name of both files."""

    state: dict[str, Any]
    model: Path
    optimizer: dict[str, Any]

    @property
    def step(self) -> int:
        return int(self.state["step"])


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
            try:
                yield
            finally:
                if not self.has_config:  # nothing came of it
                    self._leave_nothing(self.state_folder / "lock")

    def save(self, state: dict[str, Any], model: dict[str, Any], optimizer: dict[str, Any]) -> None:
        """Make this the checkpoint: all of it, or none of it and the one before stays."""
        from trainshort.models.checkpoints.weights import save_weights

        step = int(state["step"])
        names = {kind: f"{kind}-{step:08}.safetensors" for kind in (MODEL, OPTIMIZER)}
        files = {}
        try:
            for kind, tensors in ((MODEL, model), (OPTIMIZER, optimizer)):
                path = self.state_folder / names[kind]
                with replacing(path) as partial:
                    save_weights(tensors, partial)
                    files[kind] = {"name": path.name, "size": partial.stat().st_size, "sha256": sha256(partial)}
            write_json(self.state_file, {"format": FORMAT, "version": VERSION, **state, "files": files})
        except Exception as error:
            self._remove_files_but_of_the_checkpoint()
            if is_full(error):
                raise RuntimeError(self._full(step, model, optimizer)) from error
            raise
        self.publish()

    def publish(self) -> None:
        """Make the checkpoint's model the one that `load` finds, and remove files of earlier checkpoints."""
        source = self.state_folder / self.state()["files"][MODEL]["name"]
        target = self.folder / "model.safetensors"
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
        entry, target = self.state()["files"][MODEL], self.folder / "model.safetensors"
        source = self.state_folder / entry["name"]
        if not target.exists():
            return False
        return (source.exists() and target.samefile(source)) or sha256(target) == entry["sha256"]

    def load(self) -> Checkpoint:
        """The last checkpoint, every byte of it checked."""
        from safetensors import SafetensorError
        from safetensors.torch import load_file

        state = self.state()
        paths = {}
        for kind in (MODEL, OPTIMIZER):
            entry = state["files"][kind]
            path = paths[kind] = self.state_folder / entry["name"]
            advice = "restore it from a copy; nothing was changed"
            needed = f"the checkpoint of step {state['step']} needs it: {advice}"
            if (size := file_size(path, needed)) != entry["size"]:
                raise ValueError(f"{path} has {size:,} bytes and should have {entry['size']:,}: it was cut; {advice}")
            if sha256(path) != entry["sha256"]:
                raise ValueError(f"{path} has another sha256 than state.json says: it is damaged; {advice}")
        try:
            optimizer = load_file(paths[OPTIMIZER])
        except SafetensorError as error:
            raise ValueError(f"{paths[OPTIMIZER]}: not a safetensors file ({error})") from error
        return Checkpoint(state, paths[MODEL], optimizer)

    def _remove_files_but_of_the_checkpoint(self) -> None:
        wanted = {entry["name"] for entry in self.state()["files"].values()} if self.has_checkpoint else set()
        for kind in (MODEL, OPTIMIZER):
            for path in self.state_folder.glob(f"{kind}-*.safetensors"):
                if path.name not in wanted:
                    path.unlink(missing_ok=True)

    def _leave_nothing(self, lock: Path) -> None:
        lock.unlink(missing_ok=True)
        for folder in (self.state_folder, self.folder):
            with contextlib.suppress(OSError):  # somebody else's files are in it
                folder.rmdir()

    def _full(self, step: int, *parts: dict[str, Any]) -> str:
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
    files = state.object("files")
    for kind in (MODEL, OPTIMIZER):
        entry = files.object(kind)
        name = entry.text("name")
        if not (is_plain_name(name) and name.startswith(f"{kind}-") and name.endswith(".safetensors")):
            raise entry.refuse(
                f"name has to be that of a file in the same folder, {kind}-N.safetensors; got {shown(name)}"
            )
        entry.whole("size")
        entry.digest("sha256")


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
