"""What is put in the spool together, and instances that a group shares."""

import asyncio

from prorl_hpc.rollout.instances import Instances
from prorl_hpc.rollout.spool import Spool
from prorl_hpc.tasks.base import VerifierError
from tests.prorl_hpc.buffer.buffer_helpers import make_trajectory
from tests.prorl_hpc.rollout.helpers import make_lease


def test_what_is_put_together_stays_until_all_of_it_is_acked(tmp_path):
    spool = Spool(tmp_path / "spool", limit_bytes=1 << 20)
    assert spool.put(*(make_trajectory(1, r) for r in range(3)))
    assert len(list((tmp_path / "spool").iterdir())) == 1
    spool.remove((1, 0))
    assert spool.put(make_trajectory(1, 0), make_trajectory(2, 0))  # leased and made once more
    again = Spool(tmp_path / "spool", limit_bytes=1 << 20)
    assert {t.key for t in again.recover()} == {(1, 0), (1, 1), (1, 2), (2, 0)}
    assert again.num_bytes > 0
    for key in ((1, 0), (1, 1), (1, 2), (2, 0)):
        again.remove(key)
    assert again.num_bytes == 0
    assert not list((tmp_path / "spool").iterdir())


def test_a_spool_with_little_room_keeps_what_fits(tmp_path):
    one = Spool(tmp_path / "one", limit_bytes=1 << 20)
    one.put(make_trajectory(1, 0))
    spool = Spool(tmp_path / "spool", limit_bytes=2 * one.num_bytes)
    assert not spool.put(*(make_trajectory(1, r) for r in range(6)))
    assert 0 < spool.num_bytes <= 2 * one.num_bytes
    assert spool.recover()


def test_rollouts_of_a_group_share_one_making_of_their_instance():
    class Task:
        name = "sums"
        made = 0
        broken = True

        def instance(self, index, *, kind):
            self.made += 1
            if self.broken:
                raise VerifierError("the data are away")
            return index

    async def ask_all(task, instances):
        asked = [instances.get(task, make_lease()) for _ in range(4)]
        return await asyncio.gather(*asked, return_exceptions=True)

    async def check():
        task, instances = Task(), Instances()
        assert all(isinstance(e, VerifierError) for e in await ask_all(task, instances))
        task.broken = False
        assert await ask_all(task, instances) == [3, 3, 3, 3]
        assert await instances.get(task, make_lease()) == 3
        assert task.made == 2

    asyncio.run(check())
