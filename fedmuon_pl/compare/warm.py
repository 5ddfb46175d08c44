"""One process that has imported everything, of which the runs of a sweep are forks.

Importing torch and Lightning takes seconds, a fork some hundredths, and forks share the imports'
memory. A run is a process of its own all the same: with a session, an environment, a log, signals
and an exit status, as if ``python -m fedmuon_pl`` had been started, and with the same result.

Only on Linux, and not for runs on GPUs, as a process that CUDA has been asked about cannot fork.
"""

import contextlib
import json
import os
import select
import signal
import socket
import subprocess
import sys
import time
import warnings
from collections.abc import Mapping, Sequence
from typing import IO, Any, Self

__all__ = ["Starter", "WarmRun", "serve"]

_MOST = 2**22  # bytes of one message: a command and its environment


class WarmRun:
    """A run that a :class:`Starter` has started: what is used of :class:`subprocess.Popen`.

    Attributes:
        pid: The process, which leads a session of its own.
        returncode: None while it runs; negative if a signal ended it.
    """

    def __init__(self, starter: "Starter", pid: int) -> None:
        self._starter = starter
        self.pid = pid
        self.returncode: int | None = None

    def poll(self) -> int | None:
        """The exit status, or None while it runs."""
        if self.returncode is None and not self._starter.listen(0):
            try:  # nobody can say how it ends
                os.kill(self.pid, 0)
            except ProcessLookupError:
                self.returncode = -signal.SIGKILL
        return self.returncode

    def wait(self) -> int:
        """Waits for its end and returns the exit status."""
        while (code := self.poll()) is None:
            time.sleep(0.05)
        return code


class Starter:
    """Starts runs as forks of one process, which it starts at the first.

    Args:
        env: What that process has in its environment beside ours, such as the number of threads.
    """

    def __init__(self, env: Mapping[str, str]) -> None:
        self._env = env
        self._process: subprocess.Popen[bytes] | None = None
        self._runs: dict[int, WarmRun] = {}
        self._started: list[WarmRun] = []

    def __enter__(self) -> Self:
        """Nothing yet."""
        return self

    def __exit__(self, *_: object) -> None:
        """Ends the process; its forks go on."""
        if self._process is not None:
            self._socket.close()
            self._process.kill()
            self._process.wait()

    def start(self, args: Sequence[str], log: IO[bytes], env: Mapping[str, str]) -> WarmRun:
        """Starts ``fedmuon ARGS``.

        Args:
            args: The command line after the program's name.
            log: Its standard output and error.
            env: Its whole environment.

        Raises:
            OSError: If the process is gone.
        """
        if self._process is None:
            self._socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            for end in (self._socket, theirs):
                end.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _MOST)
            with theirs:
                self._process = subprocess.Popen(
                    [sys.executable, "-m", "fedmuon_pl.compare.warm", str(theirs.fileno())],
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.DEVNULL,
                    env={**os.environ, **self._env, "PYTHONUNBUFFERED": "1"},
                    pass_fds=[theirs.fileno()],
                    start_new_session=True,
                )
        message = {"args": list(args), "env": dict(env), "folder": os.getcwd()}
        socket.send_fds(self._socket, [json.dumps(message).encode()], [log.fileno()])
        while not self._started:
            if not self.listen(None):
                raise OSError(f"the process that starts runs has ended ({self._process.wait()})")
        return self._started.pop()

    def listen(self, seconds: float | None) -> bool:
        """Takes in which forks have started, and which have ended how; False if nobody says it."""
        while select.select([self._socket], [], [], seconds)[0]:
            said = self._socket.recv(_MOST)
            if not said:
                return False
            pid, code = json.loads(said)
            if code is None:
                self._runs[pid] = WarmRun(self, pid)
                self._started.append(self._runs[pid])
            else:
                self._runs.pop(pid).returncode = code
            seconds = 0
        return True


def serve(ours: socket.socket) -> int:
    """The process: forks for each message that comes, and says how forks end."""
    import gc

    gc.disable()  # see fedmuon_pl.cli.command
    from .. import training  # noqa: F401
    from ..launch import end_openmp_threads

    end_openmp_threads()
    gc.freeze()  # a collection would touch, and so copy, every shared page
    gc.enable()
    running: set[int] = set()
    while True:
        if select.select([ours], [], [], 0.05)[0]:
            said, fds, *_ = socket.recv_fds(ours, _MOST, 1)
            if not said:
                return 0
            with warnings.catch_warnings():
                # Python 3.12 warns where a thread exists; those of OpenMP have ended.
                warnings.filterwarnings("ignore", ".*multi-threaded, use of fork")
                pid = os.fork()
            if pid == 0:
                ours.close()
                return _be_a_run(json.loads(said), fds[0])
            os.close(fds[0])
            running.add(pid)
            ours.send(json.dumps([pid, None]).encode())
        for pid in list(running):
            ended, status = os.waitpid(pid, os.WNOHANG)
            if ended:
                running.remove(pid)
                with contextlib.suppress(BrokenPipeError):
                    ours.send(json.dumps([pid, os.waitstatus_to_exitcode(status)]).encode())


def _be_a_run(message: Mapping[str, Any], log: int) -> int:
    """What ``python -m fedmuon_pl`` would be, with everything imported."""
    import torch

    from ..cli import main

    os.setsid()
    os.chdir(message["folder"])
    os.environ.clear()
    os.environ.update(message["env"])
    for number in (1, 2):
        os.dup2(log, number)
    os.close(log)
    sys.argv = [sys.argv[0].replace("compare/warm.py", "__main__.py"), *message["args"]]
    torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
    return main(message["args"])


if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.default_int_handler)
    sys.exit(serve(socket.socket(fileno=int(sys.argv[1]))))
