"""From a folder with pickled weights to one with safetensors, which `load` reads.

Pickles are read by another process (unpickle.py). The new folder is made beside its place and moved there at the end:
it is there whole, or not at all. Code that lies in the old folder is not copied.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from trainshort.common.checks import is_plain_name
from trainshort.common.files import new_folder
from trainshort.common.messages import shown
from trainshort.common.reading import file_size, parse_json, read_json, refuse_pointer
from trainshort.models.checkpoints.shards import INDEX, SINGLE
from trainshort.models.checkpoints.weights import give_usual_mode

PICKLE, PICKLE_INDEX = "pytorch_model.bin", "pytorch_model.bin.index.json"
COPIED = (".json", ".txt", ".model", ".md")  # endings of what goes with the weights: config, tokenizer, description
LARGEST_COPIED = 2**28  # bytes
PROGRAM = Path(__file__).with_name("unpickle.py")


@dataclass(frozen=True)
class Converted:
    """One file of weights: which it was and is, its tensors, and how many of them shared memory with another."""

    source: str
    target: str
    names: tuple[str, ...]
    bytes: int
    copied: int


@dataclass(frozen=True)
class Conversion:
    """What `convert` did."""

    files: tuple[Converted, ...]
    kept: tuple[str, ...]
    left_out: tuple[str, ...]


def convert(folder: str | Path, out: str | Path) -> Conversion:
    """Write the folder `out`, which must not be there yet or be empty, from a folder with pickled weights."""
    folder, out = Path(folder), Path(out)
    if not folder.is_dir():
        raise FileNotFoundError(f"{folder}: no such folder; convert takes one with config.json and {PICKLE}")
    read_json(folder / "config.json", "convert takes a folder with config.json and pickled weights")
    sources = _pickles(folder)
    with new_folder(out) as partial:
        files = tuple(_convert_file(folder / source, partial / _renamed(source)) for source in sources)
        if len(files) > 1:
            _write_index(partial / INDEX, files)
        kept, left_out = _copy_others(folder, partial, sources)
    return Conversion(files, kept, left_out)


def _pickles(folder: Path) -> list[str]:
    """The names of the files with pickled weights: one, or those of the index."""
    for name in (SINGLE, INDEX):
        if (folder / name).exists():
            raise ValueError(f"{folder}: has {name} already: load reads it as it is")
    if (folder / PICKLE).exists():
        return [PICKLE]
    if not (folder / PICKLE_INDEX).exists():
        raise FileNotFoundError(f"{folder}: has neither {PICKLE} nor {PICKLE_INDEX}, so there is nothing to convert")
    index = folder / PICKLE_INDEX
    places = read_json(index, "an index says which tensor lies in which file").get("weight_map")
    if not isinstance(places, dict) or not places:
        raise ValueError(f"{index}: weight_map, which says where each tensor lies, is missing")
    for file in places.values():
        if not is_plain_name(file) or not file.endswith(".bin"):
            raise ValueError(f"{index}: names the file {shown(file)}; that must be a .bin file in the same folder")
        file_size(folder / file, f"{index.name} names it")
    return sorted(set(places.values()))


def _renamed(source: str) -> str:
    """As transformers names files of both kinds: pytorch_model-1-of-2.bin is model-1-of-2.safetensors."""
    return source.removeprefix("pytorch_").removesuffix(".bin") + ".safetensors"


def _convert_file(source: Path, target: Path) -> Converted:
    """By another process: -P keeps it from importing what lies beside the program."""
    file_size(source, "it holds pickled weights")
    refuse_pointer(source)
    command = [sys.executable, "-P", str(PROGRAM), str(source.resolve()), str(target.resolve())]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    answer = _answer(done.stdout)
    if done.returncode or "names" not in answer:
        reason = answer.get("error") or f"the process that read it ended with status {done.returncode}"
        raise ValueError(f"{source}: cannot be read as weights and nothing else ({repr(reason[:300])[1:-1]})")
    give_usual_mode(target)
    return Converted(source.name, target.name, tuple(answer["names"]), answer["bytes"], answer["copied"])


def _answer(output: str) -> dict[str, Any]:
    lines = output.strip().splitlines()
    try:
        answer = parse_json(lines[-1]) if lines else {}
    except ValueError:
        return {}
    return answer if isinstance(answer, dict) else {}


def _write_index(path: Path, files: tuple[Converted, ...]) -> None:
    places: dict[str, str] = {}
    for file in files:
        for name in file.names:
            if name in places:
                raise ValueError(f"{file.source}: has the tensor {shown(name)}, which another file has as well")
            places[name] = file.target
    total = sum(file.bytes for file in files)
    path.write_text(json.dumps({"metadata": {"total_size": total}, "weight_map": places}, indent=2) + "\n")


def _copy_others(folder: Path, partial: Path, sources: list[str]) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Copy what belongs to the weights; the names of what was copied, and of what was not."""
    kept, left_out = [], []
    for path in sorted(folder.iterdir()):
        if path.name in (*sources, PICKLE_INDEX):
            continue
        if path.is_file() and path.suffix in COPIED and path.stat().st_size <= LARGEST_COPIED:
            shutil.copyfile(path, partial / path.name)
            kept.append(path.name)
        else:
            left_out.append(path.name)
    return tuple(kept), tuple(left_out)
