"""`trainshort COMMAND`: the table of commands, and what happens to errors."""

from __future__ import annotations

import importlib
import os
import sys
import time
from collections.abc import Sequence
from dataclasses import fields
from types import ModuleType
from typing import NoReturn

import trainshort
from trainshort.cli.arguments import Parser, add_fields, read
from trainshort.cli.errors import INTERRUPTED, UsageError, name_flags, sentence
from trainshort.cli.stopping import terminable
from trainshort.common.extras import require
from trainshort.common.messages import did_you_mean
from trainshort.training.launch import ends_at_once, is_launched, local_rank, rank, run_and_end

COMMANDS = {
    "prepare": "text files to tokens",
    "train": "train a model with any position method",
    "evaluate": "perplexity of a run or a public model at any lengths",
    "compare": "position methods side by side: train each, test each, print the table",
    "generate": "continue a text",
    "bench": "attention on this machine, beside what torch offers",
    "report": "one page, figures and tables from the files of runs",
    "inspect": "what each head of a model can provably see of a text",
    "convert": "pickled weights to safetensors, or a model of ours to a BLOOM folder",
}
FIRST_STEPS = {  # of each kind of user
    "attention in your own model": "python -m pydoc trainshort.alibi_attention",
    "compare position methods": "trainshort compare",
    "run BLOOM, MPT or Falcon": 'trainshort generate FOLDER --prompt "Once"',
    "understand ALiBi": "python -m inspect trainshort.ops.reference",
}
SPEAKING = 10.0  # seconds that another process has for what this one would say too
IMPORTING = ("train", "evaluate", "compare", "generate", "inspect", "report")  # take --import
EXAMPLES = """
  trainshort compare                                        the Python library's source, four methods, one table
  trainshort prepare book.txt --out data
  trainshort train --data data --position alibi --length 256 --out runs/alibi-256
  trainshort evaluate runs/alibi-256 --lengths 256 512 1024 2048
  trainshort generate runs/alibi-256 --prompt "Call me"
"""


def start() -> NoReturn:
    """What the terminal calls: run one command and end the process with its exit status."""
    if not is_launched():
        sys.exit(main())
    run_and_end(main)


def main(typed: Sequence[str] | None = None) -> int:
    """Run one command; returns its exit status. Errors are one sentence on stderr, or a traceback with --debug."""
    words = list(sys.argv[1:] if typed is None else typed)
    head = words[: words.index("--")] if "--" in words else words
    debug = "--debug" in head
    if debug:
        words.remove("--debug")
    name = "trainshort"
    try:
        if not words:
            return _show_first_steps()
        if words[0].startswith("-"):
            return _without_command(words)
        if words[0] not in COMMANDS:
            nearest = did_you_mean(words[0], COMMANDS, typed=True)
            raise UsageError(f"there is no command {words[0]!r}{nearest} (there are {', '.join(COMMANDS)})")
        name = f"trainshort {words[0]}"
        with terminable(name):
            return _run(words[0], words[1:])
    except SystemExit as stop:  # argparse after --help
        return stop.code if isinstance(stop.code, int) else int(stop.code is not None)
    except KeyboardInterrupt as stop:  # training says more, and what signal it was
        if rank() == 0:
            print(f"\n{name}: {name_flags(str(stop), _fields(words)) or 'stopped'}", file=sys.stderr)
        return int(getattr(stop, "status", INTERRUPTED))
    except BrokenPipeError:  # the reader of our output has gone: nothing is wrong
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except Exception as error:
        if debug:
            raise
        usage = isinstance(error, UsageError)
        if usage and local_rank() > 0:  # the same was typed for all of this machine
            _let_the_first_speak()
            return 2
        text = str(error) if usage else name_flags(sentence(error), _fields(words))
        print(f"{name}: {text}" + (f" ({name} --help shows what there is)" if usage else ""), file=sys.stderr)
        return 2 if usage else 1


def _let_the_first_speak() -> None:
    """torchrun ends all processes when it sees one end, and the first may be slow to start."""
    if ends_at_once():
        time.sleep(SPEAKING)


def _fields(words: Sequence[str]) -> list[str]:
    """Those of the command that are flags."""
    if not words or words[0] not in COMMANDS:
        return []
    found = fields(_module(words[0]).Flags)
    return [each.name for each in found if not {"hidden", "positional"} & each.metadata.keys()]


def _show_first_steps() -> int:
    steps = "\n".join(f"  {aim:<29}{command}" for aim, command in FIRST_STEPS.items())
    print(f"trainshort {trainshort.__version__}: train short, test long.\n\n{steps}\n")
    print("`trainshort --help` lists all commands.")
    return 0


def _without_command(words: list[str]) -> int:
    commands = "\n".join(f"  {name:<10} {about}" for name, about in COMMANDS.items())
    parser = Parser(
        "trainshort",
        f"Train short, test long.\n\ncommands:\n{commands}\n\n`trainshort COMMAND --help` says more.",
        EXAMPLES,
    )
    parser.usage = "trainshort COMMAND [flags]"
    parser.add_argument("--version", action="version", version=f"trainshort {trainshort.__version__}")
    add_debug(parser)
    parser.refuse_unknown_flags(words)
    parser.parse_args(words)
    parser.print_help()
    return 0


def _run(name: str, words: list[str]) -> int:
    command = _module(name)
    parser = Parser(f"trainshort {name}", (command.__doc__ or "").strip(), getattr(command, "EXAMPLES", ""))
    add_fields(parser, command.Flags)
    add_debug(parser)
    if name in IMPORTING:
        parser.add_argument(
            "--import",
            dest="imports",
            action="append",
            default=[],
            metavar="FILE.py",
            help="run this file first: it makes a position method of your own known; may be given several times",
        )
    flags = read(parser, command.Flags, words)
    if name in IMPORTING and (files := parser.parse_args(words).imports):
        from trainshort.positions import import_file

        for file in files:
            import_file(file)
    packages = command.needs(flags) if hasattr(command, "needs") else getattr(command, "NEEDS", ())
    require(packages, by="this command")
    return int(command.run(flags) or 0)


def _module(name: str) -> ModuleType:
    return importlib.import_module(f"trainshort.cli.{name}")


def add_debug(parser: Parser) -> None:
    """For the help alone: it is taken out before the rest is read, wherever it stands."""
    parser.add_argument("--debug", action="store_true", help="show the traceback of an error")


if __name__ == "__main__":
    start()
