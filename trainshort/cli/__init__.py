"""The command line: one file a command, each flag a field of a dataclass.

A command is a module with three names: `Flags`, a frozen dataclass whose fields are its flags (help, positional and
choices in each field's metadata); `EXAMPLES`, shown under its help; and `run(flags)`, which does the work and may
return an exit status. Modules of commands import torch only inside `run`, so that `--help` is there at once.
"""
