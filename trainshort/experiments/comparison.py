"""comparison.json: the runs of a comparison with their records. Each `compare` into the same folder extends it.

Runs stand in one comparison if they share the data and all settings but the position method with its options, the
training length, the seed and the learning rate, which tables name. A run may have been tested in several ways: all of
its records are kept, and `tests` says which of them the last command asked for.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import trainshort
from trainshort.common.files import write_json
from trainshort.common.reading import read_json
from trainshort.data import TokenData
from trainshort.evaluation.records import Record, key_of
from trainshort.experiments.config import CompareConfig
from trainshort.training import TrainConfig

FORMAT, VERSION = "trainshort comparison", 1
NAME = "comparison.json"
MAY_DIFFER = ("position", "position_options", "length", "seed", "lr")

Entry = dict[str, Any]  # folder, position, length, seed, lr, config, training, records


class Comparison:
    """The file in the folder of a comparison, with the runs that are in it already."""

    def __init__(self, config: CompareConfig, data: TokenData) -> None:
        self.config, self.data = config, data
        self.path = Path(config.out) / NAME
        self.runs: list[Entry] = []
        self.tests: list[dict[str, Any]] = []
        if self.path.exists():
            self._read()

    def refuse_others(self, planned: Sequence[TrainConfig]) -> None:
        """Refuse to put runs beside earlier ones that they can't be compared with."""
        for entry in self.runs:
            for training in planned:
                name = Path(training.out).name
                changed = TrainConfig.from_dict(entry["config"]).differences(training)
                changed = [each for each in changed if each.split(" ", 1)[0] not in MAY_DIFFER]
                if changed and entry["folder"] != name:
                    raise ValueError(
                        f"{self.path} holds {entry['folder']}, which can't be compared with {name} "
                        f"({'; '.join(changed)}): choose another folder with out (--out)"
                    )

    def add(self, entry: Entry, records: Sequence[Record]) -> None:
        """Put a run in, or in place of what was known of it. Earlier records of the same weights stay."""
        place = next((at for at, each in enumerate(self.runs) if each["folder"] == entry["folder"]), None)
        weights = {record.get("model") for record in records}
        before = (
            [] if place is None else [each for each in self.runs[place]["records"] if each.get("model") in weights]
        )
        merged = {key_of(record): record for record in (*before, *records)}
        entry = entry | {"records": list(merged.values())}
        if place is None:
            self.runs.append(entry)
        else:
            self.runs[place] = entry

    def content(self) -> dict[str, Any]:
        data = self.data
        about = {"folder": str(data.folder), "identity": data.identity, "sources": data.meta["config"]["sources"]}
        return {
            "format": FORMAT,
            "version": VERSION,
            "trainshort": trainshort.__version__,
            "config": self.config.to_dict(),
            "data": about | {"tokenizer": data.meta["tokenizer"], "splits": data.meta["splits"]},
            "tests": self.tests,
            "runs": self.runs,
        }

    def write(self) -> None:
        write_json(self.path, self.content())

    def _read(self) -> None:
        advice = "move it away, or choose another folder with out (--out)"
        content = read_json(self.path, advice)
        try:
            if content["format"] != FORMAT or content["version"] != VERSION:
                raise ValueError("not a comparison of this version")
            identity, runs = content["data"]["identity"], [dict(each) for each in content["runs"]]
            for entry in runs:
                entry["records"] = [dict(record) for record in entry["records"]]
                # The first files had no config in each run: it followed from that of the comparison.
                entry["config"] = entry.get("config") or self._config_of(content["config"], entry)
                TrainConfig.from_dict(entry["config"])
        except (KeyError, TypeError, ValueError) as error:
            raise ValueError(f"{self.path}: not a comparison that can be extended ({error}): {advice}") from error
        if identity != self.data.identity:
            raise ValueError(
                f"{self.path} holds runs on other data ({content['data'].get('folder')}): choose another folder with "
                "out (--out), or the same data"
            )
        self.runs = runs

    @staticmethod
    def _config_of(config: dict[str, Any], entry: Entry) -> dict[str, Any]:
        made = CompareConfig.from_dict(config).training("", entry["position"], entry["length"], entry["seed"])
        return made.to_dict() | {"lr": entry["lr"]}


def common_test(trained: int, records: Sequence[Record]) -> dict[str, Any]:
    """What records of one test have in common, and at which lengths: tables are made of runs that have them all."""
    common = ("data", "data_folder", "split", "first_token", "end_token", "mode", "dtype")
    lengths = {"lengths": [each["length"] for each in records], "strides": [each["stride"] for each in records]}
    return {"trained": trained} | {name: records[0].get(name) for name in common} | lengths
