"""What the console's tabs show: who samples."""

import asyncio

from hub_support import a_hub

from kmqpy.gateway.console.sampler import Sampler


async def test_a_tab_that_comes_when_the_last_one_has_just_gone_is_shown_queues():
    async with a_hub() as (hub, _):
        sampler = Sampler(hub)
        async with asyncio.timeout(10):
            for _ in range(2):
                async with sampler.tab(""):
                    assert await sampler.next_round()
