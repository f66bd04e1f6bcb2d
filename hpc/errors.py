"""One error type per boundary of the cluster layer. Knows no learning, performs no I/O.

Every message names the field, the value and what to do. A `UserError` is a mistake the user can
mend: the command line prints its one line and exits with 2, without a traceback.
"""

EXIT_DONE = 0
"""The job finished its work; nothing is to be started again."""

EXIT_USER = 2
"""Bad input: one readable line was printed; starting again would not help."""

EXIT_CONTINUE = 75
"""The job stopped in good order and wants another attempt (walltime, preemption, lost peer)."""


class HpcError(Exception):
    """Base of every error that this project raises on purpose."""


class UserError(HpcError):
    """A mistake of the user's: printed as one line, exit code 2."""


class PlanError(UserError, ValueError):
    """A plan that can't be run: cycles, unknown jobs, resources out of bounds."""


class SiteError(UserError, ValueError):
    """A site profile that is wrong, or a plan that this site can't run."""


class SubmitError(UserError, RuntimeError):
    """The scheduler refused a job, or couldn't be reached."""


class NoAnswer(SubmitError):
    """The controller didn't answer: what was asked of it may have been done all the same."""


class RunNotFound(UserError, FileNotFoundError):
    """No run of that name or path."""


class LedgerError(HpcError, ValueError):
    """A ledger line that can't be read, or is of a newer format."""


class ImageError(UserError, RuntimeError):
    """An image that is missing, damaged, or can't be built."""


class SandboxError(HpcError, RuntimeError):
    """An environment that couldn't be started or kept alive (an infrastructure failure)."""


class IsolationError(UserError, RuntimeError):
    """An isolation feature that this site doesn't give; the message holds the admin's fix."""


class EndpointTimeout(HpcError, TimeoutError):
    """A role didn't publish where it listens in time; the message names it and its last state."""


class FanoutError(UserError, RuntimeError):
    """A fan-out over a job array that can't be started."""
