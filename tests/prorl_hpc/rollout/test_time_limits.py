"""Time limits that stand still while nobody serves the policy."""

import asyncio

import pytest

from prorl_hpc.rollout.limits import TimeLimits


def test_a_pause_is_not_counted() -> None:
    async def check() -> None:
        limits = TimeLimits()
        async with limits.timeout(1000.0) as limit:
            loop = asyncio.get_running_loop()
            before = limit.when()
            limits.pause()
            limits.pause()
            assert limit.when() is None
            started = loop.time()
            await asyncio.sleep(0.05)
            limits.resume()
            after, now = limit.when(), loop.time()
            assert before is not None
            assert after is not None
            assert 0.05 <= after - before <= now - started + 0.05
        assert limits.paused_seconds >= 0.05
        limits.resume()

    asyncio.run(check())


def test_a_limit_that_begins_in_a_pause_begins_at_its_end() -> None:
    async def check() -> None:
        limits = TimeLimits()
        limits.pause()
        async with limits.timeout(5000.0) as limit:
            assert limit.when() is None
            limits.resume()
            when = limit.when()
            assert when is not None
            assert when > asyncio.get_running_loop().time() + 4000
        assert not limits._left

    asyncio.run(check())


def test_limits_still_expire() -> None:
    async def check() -> None:
        limits = TimeLimits()
        with pytest.raises(TimeoutError):
            async with limits.timeout(0.01) as limit:
                await asyncio.sleep(3600)
        assert limit.expired()
        limits.pause()
        with pytest.raises(TimeoutError):
            async with limits.timeout(0.01) as limit:
                asyncio.get_running_loop().call_later(0.05, limits.resume)
                await asyncio.sleep(3600)
        assert limit.expired()

    asyncio.run(check())
