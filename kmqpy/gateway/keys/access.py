"""Decides who sends a request, and whether the sender is within the limits of its key."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from concurrent.futures import Executor

from kmqpy.core.clock import SYSTEM_CLOCK, Clock
from kmqpy.gateway.keys.keyring import ANYBODY, ApiKey, Keyring, Principal
from kmqpy.gateway.keys.sigv4 import secret_of
from kmqpy.gateway.keys.stores import KeyStore
from kmqpy.gateway.keys.web_pages import objection
from kmqpy.gateway.limits import Held, Overloaded, Rate, Share


class Access:
    """Finds the sender of a request; used on one event loop.

    keys         None: everybody may do everything
    may_be_open  the same as long as there never was a key
    own_names    of the gateway, which may stand in the Host of requests that need no key
    operator_key  of which secrets for AWS's signatures are made; None: there are no such keys
    """

    def __init__(
        self,
        keys: KeyStore | None,
        threads: Executor,
        *,
        may_be_open: bool,
        own_names: Sequence[str] = (),
        operator_key: bytes | None = None,
        clock: Clock = SYSTEM_CLOCK,
    ) -> None:
        self._keyring = None
        if keys is not None:

            async def read() -> Sequence[ApiKey] | None:
                return await asyncio.wrap_future(threads.submit(keys.read))

            self._keyring = Keyring(read, may_be_open=may_be_open, clock=clock)
        self._own_names = own_names
        self._operator_key = operator_key
        self._clock = clock
        self._rates: dict[tuple[str, str, float], Rate] = {}
        self._held: dict[str, Held] = {}

    async def __call__(self, secret: str | None) -> Principal | None:
        """Who has this secret; None for nobody. Raises Overloaded above the key's requests per second."""
        if self._keyring is None:
            return ANYBODY
        sender = await self._keyring.who(secret)
        if sender is not None:
            self.spend_request(sender)
        return sender

    async def of_id(self, key_id: str | None) -> Principal | None:
        """Who has the key of this id, if the sender then proves to have its secret; None for nobody."""
        return ANYBODY if self._keyring is None else await self._keyring.of_id(key_id)

    def spend_request(self, sender: Principal) -> None:
        """Count a request; raises Overloaded above the key's requests per second."""
        if sender.key is not None:
            self._spend(sender.key, "requests_per_s", 1)

    def aws_secrets(self, sender: Principal) -> list[str]:
        """The secrets by which a sender may sign; none if its key is of another kind."""
        key = sender.key
        if key is None or self._operator_key is None:
            return []
        return [secret_of(self._operator_key, key.id, nonce) for nonce in key.nonces]

    def objection(self, sender: Principal, header: Callable[[str], str]) -> str:
        """Why a request is refused although its sender may send it: a web page does, without a key."""
        return objection(header, self._own_names) if sender.key is None else ""

    def count_held(self, sender: Principal, share: Share, most: int) -> None:
        """Have what a request holds in memory count for its key, too, all of which may hold `most` bytes."""
        if sender.key is not None:
            share.join(self._held.get(sender.id) or self._held.setdefault(sender.id, Held(most)))

    def spend_bytes(self, sender: Principal, count: int) -> None:
        """Count bytes of a body; raises Overloaded above the key's bytes per second."""
        if sender.key is not None:
            self._spend(sender.key, "bytes_per_s", count)

    def _spend(self, key: ApiKey, limit: str, amount: float) -> None:
        per_second = getattr(key, limit)
        if per_second is None:
            return
        name = (key.id, limit, per_second)
        rate = self._rates.get(name)
        if rate is None:
            rate = self._rates[name] = Rate(per_second, self._clock)
        wait_s = rate.spend(amount)
        if wait_s:
            raise Overloaded(f"the key's limit, {limit}, is reached", "key", wait_s)
