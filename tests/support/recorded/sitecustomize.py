"""On the path of a process: its imports are written to a file of the process, whatever it does and however it ends."""

import os
import sys

if directory := os.environ.get("PACELINE_TEST_IMPORTS"):

    def note(event, arguments):
        if event == "import":
            with open(f"{directory}/{os.getpid()}.imports", "a") as file:  # noqa: PTH123  pathlib is an import too
                file.write(f"{arguments[0]}\n")

    def note_process():
        with open(f"{directory}/{os.getpid()}.command", "w") as file:  # noqa: PTH123
            file.write(" ".join(sys.orig_argv))

    note_process()
    os.register_at_fork(after_in_child=note_process)
    sys.addaudithook(note)
