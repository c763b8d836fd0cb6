"""The first process of a container hands signals on and buries orphans, and a process below it runs the command.

The kernel keeps from a first process the signals that it has no handler for, so SIGTERM would be lost while the command
is imported; and it makes every orphan of the container a child of the first process.
"""

import os
import signal

_HANDED_ON = {
    signal.SIGTERM,
    signal.SIGINT,
    signal.SIGHUP,
    signal.SIGQUIT,
    signal.SIGABRT,
    signal.SIGUSR1,
    signal.SIGUSR2,
}
_OF_TERMINAL = 0x80  # si_code of a signal that the kernel has sent, to all processes in the terminal's foreground


def leave_first_process() -> None:
    """Return in a process below this one where this is the first of a container; this one ends as that one does."""
    if os.getpid() != 1:
        return
    heard = _HANDED_ON | {signal.SIGCHLD}
    before = signal.pthread_sigmask(signal.SIG_BLOCK, heard)
    command = os.fork()
    if not command:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
        return
    while True:
        info = signal.sigwaitinfo(heard)
        if info.si_signo == signal.SIGCHLD:
            _bury(command)
        elif info.si_code != _OF_TERMINAL:
            os.kill(command, info.si_signo)


def _bury(command: int) -> None:
    """Wait for all children that have ended; end if the command is among them."""
    while True:
        ended, status = os.waitpid(-1, os.WNOHANG)
        if ended == command:
            code = os.waitstatus_to_exitcode(status)
            os._exit(code if code >= 0 else 128 - code)  # as shells report a signal
        if not ended:
            return
