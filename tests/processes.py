"""The command line in a separate process, forked from one that imported torch, transformers and lookahead.

``python -m lookahead`` spends 7 s of CPU time on these imports. A forked process also has its own memory,
files, signals and exit status. test_cli.py tests that the command also starts the way a user starts it.
"""

import atexit
import multiprocessing
import os
import signal
import subprocess
import sys
import traceback

import assumed_curves

#: What the fork server imports: nothing that starts a thread or reads a single test's environment.
PRELOAD = [
    "torch.distributed",
    "lookahead.parallel",
    "lookahead.testing",
    "lookahead.hf.exact_mode",
    "lookahead.hf.batch_rows",
    "lookahead.cpu.compiled_model",
    "lookahead.hf.module_families",
    "lookahead.drafters.adaptive",
    "lookahead.llm",
    "lookahead.cli",
    "lookahead.server.app",
    "uvicorn",
    "transformers.models.auto.modeling_auto",
    "transformers.models.auto.tokenization_auto",
    "transformers.models.llama.modeling_llama",
    "transformers.models.gemma3.modeling_gemma3",
    "transformers.models.gpt_neox.modeling_gpt_neox",
]


def forks():
    """The context that forks processes from the one fork server of this test process."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOAD)
    return context


def _send_result(pipe, function, arguments):
    assumed_curves.use()
    try:
        pipe.send((function(*arguments), None))
    except BaseException:
        pipe.send((None, traceback.format_exc()))


def result_of(function, *arguments, within):
    """What a function of a module returns in a forked process; there, a hang or the end of the process is an error.

    Args:
        within: seconds.
    """
    received, sent = forks().Pipe(duplex=False)
    process = forks().Process(target=_send_result, args=(sent, function, arguments), daemon=True)
    process.start()
    sent.close()
    try:
        assert received.poll(within), f"no result in {within} s"
        result, error = received.recv()
    finally:
        process.kill()
        process.join()
        received.close()
    assert error is None, error
    return result


def _command(arguments, stdout, stderr, environment, folder):
    os.chdir(folder)
    os.environ.clear()
    os.environ.update(environment)
    for number, path in ((1, stdout), (2, stderr)):
        if path is not None:
            os.dup2(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND), number)
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background jobs ignore SIGINT
    sys.argv = ["lookahead", *arguments]
    assumed_curves.use()
    from lookahead.cli import main

    try:
        main()
    finally:
        atexit._run_exitfuncs()  # multiprocessing exits without these


class Command:
    """``lookahead ARGUMENTS``, with the parts of ``Popen`` that tests use. Output goes to named files."""

    def __init__(self, arguments, stdout=None, stderr=None, **environment):
        paths = [None if path is None else os.fspath(path) for path in (stdout, stderr)]
        given = [*map(str, arguments)], *paths, os.environ | environment, os.getcwd()
        self._process = forks().Process(target=_command, args=given, daemon=True)
        self._process.start()
        self.pid = self._process.pid

    @property
    def returncode(self):
        return self._process.exitcode

    def poll(self):
        return self.returncode

    def send_signal(self, number):
        if self.returncode is None:
            os.kill(self.pid, number)

    def kill(self):
        self._process.kill()

    def wait(self, timeout=None):
        self._process.join(timeout)
        if self.returncode is None:
            raise subprocess.TimeoutExpired("lookahead", timeout)
        return self.returncode
