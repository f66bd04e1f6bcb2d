"""The calls of one episode as a tree of token ids. Pure; knows no text and no API.

    prompt A | answer 1 | suffix | answer 2           calls 1 and 2: one branch, one trajectory
                        \\ suffix' | answer 3          call 3 goes on from call 1 in another way
    prompt B | answer 4                               a conversation of its own

A call whose messages continue an earlier call's messages and answer becomes its child: the ids of
the parent are used as they are, and only what was added is tokenised. Each leaf is the end of one
branch.
"""

from dataclasses import dataclass, field

from prorl_hpc.agents.episode import Transcript
from prorl_hpc.inference.engine import Completion


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Call:
    """One answered call."""

    number: int
    parent: "Call | None"
    given: tuple[int, ...]
    """The prompt, or what follows the parent's answer."""
    completion: Completion
    text: str
    """The whole answer, decoded."""

    @property
    def path(self) -> "list[Call]":
        """From the beginning of the conversation to this call."""
        calls: list[Call] = []
        here: Call | None = self
        while here is not None:
            calls.append(here)
            here = here.parent
        return calls[::-1]

    @property
    def ids(self) -> tuple[int, ...]:
        """Everything up to and with this answer."""
        return tuple(
            i for call in self.path for ids in (call.given, call.completion.token_ids) for i in ids
        )

    @property
    def transcript(self) -> Transcript:
        """The branch that ends here, with who made its tokens."""
        transcript = Transcript()
        for call in self.path:
            transcript.given(call.given)
            done = call.completion
            transcript.sampled(done.token_ids, logprobs=done.logprobs, versions=done.versions)
        return transcript


@dataclass(slots=True)
class CallTree:
    """All calls of an episode."""

    calls: list[Call] = field(default_factory=list)
    _by_digest: dict[bytes, Call] = field(default_factory=dict)

    def add(self, call: Call, *, digest: bytes) -> None:
        """`digest` names the conversation up to and with the answer. The newest of equals wins."""
        self.calls.append(call)
        self._by_digest[digest] = call

    def find(self, digest: bytes) -> Call | None:
        """The call whose conversation and answer have that name."""
        return self._by_digest.get(digest)

    @property
    def leaves(self) -> list[Call]:
        """The last call of each branch, in the order of the calls."""
        parents = {id(call.parent) for call in self.calls if call.parent is not None}
        return [call for call in self.calls if id(call) not in parents]

    @property
    def main(self) -> Call | None:
        """The end of the branch with most sampled tokens; of equals, the newest."""

        def sampled(call: Call) -> int:
            return sum(len(one.completion.token_ids) for one in call.path)

        return max(self.leaves, key=lambda call: (sampled(call), call.number), default=None)
