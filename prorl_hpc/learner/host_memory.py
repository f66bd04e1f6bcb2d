"""Main memory of a learner's node whose ranks compute on GPUs. Pure; imports no torch.

Counted is what is surely there: a whole policy on its way to the disk, the copies that a checkpoint
on its way is made of, a reference that waits, and the processes themselves.
"""

from prorl_hpc.choices import ReferencePlacement
from prorl_hpc.learner.memory import FLOAT, GIB, HALF, ModelFacts, estimate
from prorl_hpc.recipe import Recipe, RecipeError

PROCESS_BYTES = GIB
"""A rank with torch and CUDA loaded, at least."""


def host_bytes(recipe: Recipe, facts: ModelFacts) -> int:
    """What the first node of the learner needs; the others gather no policy."""
    learner = recipe.learner
    has_reference = recipe.algorithm.kl_coef > 0
    trained = estimate(recipe, facts).gradients * learner.ranks_per_node
    copies = 0 if learner.deterministic else 4 if has_reference else 3
    waits = has_reference and learner.reference_placement is ReferencePlacement.cpu
    width = HALF if recipe.model.dtype == "bfloat16" else FLOAT
    training = width * facts.num_parameters + (copies + int(waits)) * trained
    starting = FLOAT * facts.num_parameters  # the model as it is read, before it is trained
    return learner.ranks_per_node * PROCESS_BYTES + max(training, starting)


def check_host_memory(recipe: Recipe, facts: ModelFacts) -> None:
    """Raises RecipeError when `learner.memory_mib` can't hold it."""
    need = -(-host_bytes(recipe, facts) // (1 << 20))
    asked = recipe.learner.memory_mib
    if need > asked:
        raise RecipeError(
            f"learner.memory_mib={asked}: a node of {recipe.learner.ranks_per_node} ranks keeps "
            f"about {need} MiB in main memory (a policy and a checkpoint on their way to the disk "
            f"of {facts.num_parameters / 1e9:.2f} billion parameters); set "
            f"learner.memory_mib={need} or more, or use more learner.nodes"
        )
