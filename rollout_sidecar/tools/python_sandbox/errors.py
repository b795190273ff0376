"""What can be wrong with the sandbox itself, as opposed to the code that runs in it."""


class SandboxUnavailableError(RuntimeError):
    """There can be no sandbox here; the message says why, and what to do."""


class WorkerLostError(RuntimeError):
    """A worker ended, or did not answer, in the middle of a call."""
