"""The entry point of `python -m alignedserve` and of the script `alignedserve`."""

import os
import sys

try:
    from alignedserve.safe_path import leave_out_working_directory

    leave_out_working_directory()  # before any other import
    from alignedserve.cli.terminal.first_process import leave_first_process
    from alignedserve.interrupt import INTERRUPTED, LeavesAtOnce, end_at_once
except KeyboardInterrupt:
    os._exit(130)


def main() -> int:
    leave_first_process()
    with LeavesAtOnce():
        from alignedserve.cli import main as cli
    try:
        return cli.main()
    except KeyboardInterrupt:  # between the end of the command line and of this function
        return INTERRUPTED
    finally:
        end_at_once()  # also while the interpreter ends


if __name__ == "__main__":
    sys.exit(main())
