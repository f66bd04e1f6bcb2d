"""The error of the learner's mathematics. Knows only the error base of the cluster layer."""

from hpc.errors import UserError


class AlgorithmError(UserError, ValueError):
    """A setting of the algorithm that can't be used; the message names it and the remedy."""
