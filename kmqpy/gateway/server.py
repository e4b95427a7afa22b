"""Runs a gateway: listens, answers, and stops without losing anything."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import functools
import ipaddress
import json
import logging
import re
import signal
import socket
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import uvicorn
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from kmqpy.errors import ConfigError, KmqError, Unavailable
from kmqpy.gateway import console
from kmqpy.gateway.app import GatewayApp, admin_app
from kmqpy.gateway.connections import guarded
from kmqpy.gateway.console.sampler import Sampler
from kmqpy.gateway.dialects import emodb, native, sqs
from kmqpy.gateway.discovery.ostrich import end_points
from kmqpy.gateway.discovery.peers import (
    SAID_PATH,
    TAKE_PATH,
    TOKEN_HEADER,
    Peers,
    parse_hearsay,
    parse_request,
)
from kmqpy.gateway.discovery.peers import answer as peer_answer
from kmqpy.gateway.discovery.registration import Registration
from kmqpy.gateway.http import json_response
from kmqpy.gateway.keys.access import Access
from kmqpy.gateway.keys.stores import KeyStore
from kmqpy.gateway.limits import Limits
from kmqpy.gateway.metrics import DEFAULT, GatewayMetrics
from kmqpy.gateway.service.hub import Hub
from kmqpy.gateway.service.moves import DEFAULT_ROOT, Moves
from kmqpy.gateway.service.polls import Polls
from kmqpy.gateway.service.pulse import QUICK_S
from kmqpy.gateway.tls import check_tls
from kmqpy.gateway.tracker_process import TrackerProcess
from kmqpy.queue import Storage
from kmqpy.zookeeper.settings import ZooKeeperConnection

_log = logging.getLogger(__name__)

_THREADS = 8
_KEEP_ALIVE_S = 75
"""Idle connections stay open for this time, in seconds: clients that reuse one must not meet its end."""
_PAIR_TRIES = 50
"""How often any free port is asked for until the next one is free, too."""
_BACKLOG = 2_048
_CLUSTER = re.compile(r"[A-Za-z0-9._:-]{1,200}")
_ACCOUNT = re.compile(r"[0-9]{12}")
_REGION = re.compile(r"[a-z0-9-]{1,50}")
_URL = re.compile(r"https?://[A-Za-z0-9.:_\[\]-]+/?")
_MAX_DRAIN_S = 3_600
_WARM_S = 3.0
"""Seconds until clients are told of a gateway that has not reached Kafka yet."""
_MOVES_END_S = 5.0
"""Moves get so many seconds to finish their batches; one that is cut is sent again by the next gateway."""
_CLOSE_S = 20.0
"""Seconds for storages and trackers to close."""
_AWAY_MOVES_S, _AWAY_CLOSE_S = 0.1, 0.5
"""The same if a storage does not answer; what is not done then, the end of claims and sessions will do."""
_HANDSHAKE_S = 0.5
_EVERYWHERE = ("0.0.0.0", "::")  # noqa: S104


@dataclass(frozen=True, kw_only=True)
class GatewaySettings:
    """Where and how a gateway serves.

    host, port     where it listens for clients; port 0: any free one
    admin_port     where operators and health checks ask; None: port + 1
    has_admin      whether anybody can ask there
    tls_cert       a certificate file (PEM) for clients' connections; with tls_key
    tls_key        its key file
    cluster        the name of the cluster in the names of services, for discovery
    discovery      ZooKeeper, where the gateway registers; None: it does not
    peers          ZooKeeper, where gateways of the same queues on Kafka find each other; None: they do not
    roots          kmqpy's znode of each storage on Kafka, by the storage's name; the first is that of peers
    advertise      host name that clients and gateways find there; None: `host`, or the machine's name
    drain_s        seconds from the withdrawal to the end of serving
    quick_s        requests are given up when their storage has answered nobody for so many seconds
    region         of SQS, in ARNs
    account        of SQS, in ARNs and queue URLs: 12 digits
    public_url     what SQS's queue URLs begin with; empty: scheme, host and port of the request
    aws_key        the operator's key, of which secrets for AWS's signatures are made; None: there are none
    sqs_rest_s     for SQS's clients: seconds between two purges, and until a deleted queue can be made again
    sqs_fair       patterns of names: standard queues that SQS's clients make are fair if one fits
    limits         what it takes on
    """

    host: str = "127.0.0.1"
    port: int = 8080
    admin_port: int | None = None
    has_admin: bool = True
    tls_cert: Path | None = None
    tls_key: Path | None = None
    cluster: str = ""
    discovery: ZooKeeperConnection | None = None
    peers: ZooKeeperConnection | None = None
    roots: Mapping[str, str] = field(default_factory=dict)
    advertise: str | None = None
    drain_s: float = 2.0
    quick_s: float = QUICK_S
    region: str = "us-east-1"
    account: str = "000000000000"
    public_url: str = ""
    aws_key: bytes | None = field(default=None, repr=False)
    sqs_rest_s: float = sqs.REST_S
    sqs_fair: Sequence[str] = ()
    limits: Limits = field(default_factory=Limits)

    def __post_init__(self) -> None:
        if self.cluster and not _CLUSTER.fullmatch(self.cluster):
            raise ConfigError(f"cluster name: {self.cluster!r} may have letters, digits and . _ : - only")
        if not 0 <= self.drain_s <= _MAX_DRAIN_S:
            raise ConfigError(f"drain: {self.drain_s:g} s must be from 0 to {_MAX_DRAIN_S} s")
        if not _ACCOUNT.fullmatch(self.account):
            raise ConfigError(f"account: {self.account!r} must have 12 digits")
        if not _REGION.fullmatch(self.region):
            raise ConfigError(f"region: {self.region!r} may have small letters, digits and - only")
        if self.public_url and not _URL.fullmatch(self.public_url):
            raise ConfigError(f"public_url: {self.public_url!r} must be http://HOST[:PORT], or https")


class Gateway:
    """One gateway. Raises ConfigError for addresses that can't be opened.

    storages  by name, the default one under ""; closed at the end of run()
    keys      None: the gateway asks for no keys; nor does it as long as there never was one
    trackers  those that run beside it, by the names of their storages; their state is shown to operators
    entry     of `kmq console`: people get in by it; keys are not made in the console then
    """

    def __init__(
        self,
        settings: GatewaySettings,
        storages: Mapping[str, Storage],
        keys: KeyStore | None = None,
        trackers: Mapping[str, TrackerProcess] | None = None,
        entry: console.Entry | None = None,
    ) -> None:
        if (settings.tls_cert is None) != (settings.tls_key is None):
            raise ConfigError("tls_cert and tls_key: give both, or none")
        if settings.tls_cert is not None and settings.tls_key is not None:
            check_tls(settings.tls_cert, settings.tls_key)
        self._sockets = _listening(settings)
        is_local = all(ipaddress.ip_address(one.getsockname()[0]).is_loopback for one in self._sockets)
        if not is_local and (keys is None or _are_missing(keys)):
            for listener in self._sockets:
                listener.close()
            raise ConfigError(
                f"host: {settings.host} can be reached from elsewhere, and there are no keys; make one with: "
                "kmq key --storage URL create --role queue_standard, with the URL of this gateway "
                "(on Kafka: --keys FILE, here and for the gateway)"
            )
        self.port: int = self._sockets[0].getsockname()[1]
        self.admin_port: int = self._sockets[-1].getsockname()[1]
        self._settings = settings
        self._storages = storages
        self._trackers = trackers or {}
        # For all but the calls of queues. Each has its own, so that a storage that is away holds no other's.
        self._threads = ThreadPoolExecutor(_THREADS, "kmq-gateway")
        self._key_threads = ThreadPoolExecutor(1, "kmq-gateway-keys")
        self._metrics = GatewayMetrics()
        self._peers = self._new_peers()
        self._hub = Hub(storages, elsewhere=self._peers, quick_s=settings.quick_s)
        self._moves = Moves(
            self._hub,
            list(dict.fromkeys(storages.values())),
            roots={storages[name]: root for name, root in settings.roots.items()},
            on_end=lambda outcome: self._metrics.moves.labels(outcome).inc(),
        )
        access = Access(
            keys,
            self._key_threads,
            may_be_open=is_local,
            own_names=[settings.host, settings.advertise or settings.host],
            operator_key=settings.aws_key,
        )
        dialect = emodb.EmoDialect(self._hub, self._moves, access)
        polls = Polls(self._hub)
        self._sqs = sqs.SqsDialect(
            self._hub,
            polls,
            access,
            region=settings.region,
            account=settings.account,
            public_url=settings.public_url,
            rest_s=settings.sqs_rest_s,
            fair=settings.sqs_fair,
        )
        self._is_console = entry is not None
        self._sampler = Sampler(self._hub)
        pages = console.Console(
            self._hub,
            access,
            self._sampler,
            keys=keys if entry is None else None,
            storages=storages,
            threads=self._key_threads,
            problems=lambda: [*self._problems(), *self._notes()],
            entry=entry,
        )
        self._app = GatewayApp(
            {
                **dict.fromkeys(emodb.BASES, ("emodb", dialect.answer)),
                native.BASE: ("native", native.NativeDialect(self._hub, polls, access).answer),
                console.BASE: ("console", pages.answer),
            },
            limits=settings.limits,
            metrics=self._metrics,
            busy={"emodb": emodb.BUSY, "native": native.BUSY, "sqs": sqs.BUSY},
            spoken=[("sqs", self._sqs.answer, sqs.speaks)],
            home=f"{console.BASE}/",
            counted=self._sampler.count,
        )
        self._registration: Registration | None = None
        self._probing: asyncio.Task[bool] | None = None
        self._stop = asyncio.Event()
        self._hurry = asyncio.Event()

    @property
    def url(self) -> str:
        """Where clients find it."""
        scheme = "http" if self._settings.tls_cert is None else "https"
        host = f"[{self._settings.host}]" if ":" in self._settings.host else self._settings.host
        return f"{scheme}://{host}:{self.port}"

    def request_stop(self) -> None:
        """Let run() end gracefully; called on the event loop."""
        self._stop.set()

    async def run(self, *, on_ready: Callable[[], None] = lambda: None, handle_signals: bool = False) -> bool:
        """Serve until request_stop(), or with `handle_signals` SIGTERM or SIGINT; then drain and close.

        A second signal ends the drain; requests that run are finished all the same. Returns False if threads
        are left that wait for a storage: then the caller ends the process. Raises what a server could not
        start for.
        """
        servers = self._servers()
        serving = [
            asyncio.ensure_future(server.serve([listener]))
            for server, listener in zip(servers, self._sockets, strict=True)
        ]
        # A console looks: it neither works for others, nor makes what only gateways need.
        work: list[Any] = [] if self._is_console else [self._moves.run(), self._sqs.run()]
        moving = asyncio.ensure_future(asyncio.gather(*map(_logged, work)))
        warming = asyncio.wrap_future(self._threads.submit(self._warm_up))
        with _stopped_by_signals(self._on_signal) if handle_signals else contextlib.nullcontext():
            try:
                await _started(servers, serving)
                await asyncio.wait([warming], timeout=_WARM_S)
                self._register()
                on_ready()
                stopping = asyncio.ensure_future(self._stop.wait())
                await asyncio.wait([stopping, *serving], return_when=asyncio.FIRST_COMPLETED)
                stopping.cancel()
                await self._drain()
            finally:
                await self._end(servers, serving, moving)
                is_closed = await self._close()
        await asyncio.gather(*serving)
        return is_closed

    async def _drain(self) -> None:
        """Tell clients to go elsewhere, and serve those that have not heard of it yet."""
        _log.info("draining")
        self._app.draining = True
        self._sampler.stop()
        self._moves.stop()
        self._probing = asyncio.ensure_future(self._moves.probe())
        registered = [one for one in (self._registration, self._peers) if one is not None]
        await asyncio.gather(*(asyncio.to_thread(one.close) for one in registered))
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._hurry.wait(), self._settings.drain_s)

    async def _end(
        self,
        servers: Sequence[uvicorn.Server],
        serving: Sequence[asyncio.Future[None]],
        moving: asyncio.Future[Any],
    ) -> None:
        """Let requests and batches of moves finish; operators are answered until then."""
        self._moves.stop()
        self._sqs.stop()
        for server, task in zip(servers, serving, strict=True):
            server.should_exit = True
            await asyncio.wait([task])
            await self._wait_for(moving, _MOVES_END_S, _AWAY_MOVES_S)
            moving.cancel()
        for listener in self._sockets:  # of a server that has not started
            listener.close()

    def _on_signal(self) -> None:
        (self._hurry if self._stop.is_set() else self._stop).set()

    def _warm_up(self) -> None:
        """Open what the first send would have to wait for."""
        if self._is_console:
            return
        for storage in self._storages.values():
            if not storage.capabilities.immediate:
                try:
                    self._moves.warm_up(storage)
                    self._hub.note(storage, answered=True)
                except KmqError as error:
                    self._hub.note(storage, answered=not isinstance(error, Unavailable))
                    _log.warning("not warm yet", extra={"error": str(error)})

    async def _close(self) -> bool:
        """Close all, also the trackers, which nobody needs any more; False if that takes too long."""
        closes = [self._close_storages, *(tracker.close for tracker in self._trackers.values())]
        # Not in the loop's executor, for which asyncio waits.
        threads = ThreadPoolExecutor(len(closes), "kmq-gateway-close")
        closing = asyncio.gather(*(asyncio.wrap_future(threads.submit(close)) for close in closes))
        await self._wait_for(closing, _CLOSE_S, _AWAY_CLOSE_S)
        if closing.done():
            closing.result()
        else:
            _log.warning("not all is closed: a storage does not answer")
        return closing.done()

    def _close_storages(self) -> None:
        for threads in (self._threads, self._key_threads):
            threads.shutdown()
        self._moves.close()
        self._hub.close()

    async def _wait_for(self, task: asyncio.Future[Any], most_s: float, away_s: float) -> None:
        """Wait for a task, only for `away_s` seconds if a storage is silent, or somebody is in a hurry."""
        await asyncio.wait([task], timeout=away_s)
        is_away = self._probing is not None and not (self._probing.done() and self._probing.result())
        if not task.done() and not is_away:
            hurrying = asyncio.ensure_future(self._hurry.wait())
            await asyncio.wait([task, hurrying], timeout=most_s, return_when=asyncio.FIRST_COMPLETED)
            hurrying.cancel()

    @property
    def _advertised(self) -> str:
        settings = self._settings
        advertised = (settings.advertise or "").strip("[]")
        return advertised or (socket.gethostname() if settings.host in _EVERYWHERE else settings.host)

    def _new_peers(self) -> Peers | None:
        settings = self._settings
        if settings.peers is None:
            return None
        return Peers(
            settings.peers,
            next(iter(settings.roots.values()), DEFAULT_ROOT),
            f"{self._advertised}:{self.admin_port}",
            self._threads,
            on_asked=lambda outcome: self._metrics.asked.labels(outcome).inc(),
        )

    def _register(self) -> None:
        settings = self._settings
        scheme = "http" if settings.tls_cert is None else "https"
        if settings.discovery is not None:
            points = end_points(settings.cluster, self._advertised, self.port, self.admin_port, scheme)
            self._registration = Registration(settings.discovery, points)
        if self._peers is not None:
            self._peers.register()

    def _is_from_peer(self, request: Request) -> bool:
        return self._peers is not None and self._peers.is_token(request.headers.get(TOKEN_HEADER, ""))

    async def _hear_other(self, request: Request) -> Response:
        """Heed what another gateway tells."""
        if not self._is_from_peer(request):
            return Response(status_code=403)
        try:
            handed_out = self._hub.hear(*parse_hearsay(await request.body()))
        except ValueError:
            return Response(status_code=400)
        return json_response(json.dumps(handed_out).encode())

    async def _answer_other(self, request: Request) -> Response:
        """Answer another gateway that asks for messages."""
        if not self._is_from_peer(request):
            return Response(status_code=403)
        try:
            asked = parse_request(await request.body())
        except ValueError:
            return Response(status_code=400)
        try:
            messages = await self._hub.take_for_other(asked.unique_id, asked.limit, asked.lease_s)
        except KmqError as error:
            _log.warning("nothing for another gateway", extra={"error": str(error)})
            return Response(status_code=503)
        if messages and await request.is_disconnected():
            await self._hub.give_back(asked.unique_id, messages)
        return json_response(peer_answer(messages))

    def _servers(self) -> list[uvicorn.Server]:
        common: dict[str, Any] = {
            "loop": "none",
            "ws": "none",
            "lifespan": "off",
            "log_config": None,
            "access_log": False,
            "server_header": False,
            "proxy_headers": False,
            "timeout_keep_alive": _KEEP_ALIVE_S,
            "timeout_graceful_shutdown": 30,
        }
        http = guarded(self._settings.limits, self._metrics)
        admin = admin_app(
            self._metrics,
            self._problems,
            self._refresh_metrics,
            self._notes,
            [
                Route(TAKE_PATH, self._answer_other, methods=["POST"]),
                Route(SAID_PATH, self._hear_other, methods=["POST"]),
            ],
        )
        clients = uvicorn.Config(
            self._app,
            http=http,
            ssl_certfile=self._settings.tls_cert,
            ssl_keyfile=self._settings.tls_key,
            **common,
        )
        configs = [clients, uvicorn.Config(admin, http=http, **common)]
        return [_Server(one) for one in configs[: len(self._sockets)]]

    def _problems(self) -> list[str]:
        silent = [f"storage {name or DEFAULT} does not answer" for name in self._hub.silent_storages()]
        return silent + ["draining"] * self._app.draining

    def _notes(self) -> list[str]:
        """What is wrong though the gateway can serve: trackers of others may do the work of its own."""
        return [
            f"the tracker of storage {name or DEFAULT} does not run: it has ended {tracker.deaths} times, "
            f"last with exit code {tracker.last_exit}"
            for name, tracker in self._trackers.items()
            if not tracker.running
        ]

    def _refresh_metrics(self) -> None:
        for name, tracker in self._trackers.items():
            self._metrics.show_tracker(name or DEFAULT, tracker.deaths, running=tracker.running)
        self._metrics.open_queues.set(self._hub.open_queues)
        self._metrics.running.set(self._app.running)
        self._metrics.held.set(self._app.held_bytes)
        self._metrics.late.set(self._hub.late_messages)
        silent = self._hub.silent_storages()
        for name in self._storages:
            self._metrics.storage_up.labels(name or DEFAULT).set(name not in silent)
        if self._registration is not None:
            self._metrics.registered.labels("discovery").set(self._registration.registered)
        if self._peers is not None:
            self._metrics.registered.labels("gateways").set(self._peers.registered)
            self._metrics.others.set(len(self._peers.others))


async def _logged(moves: Awaitable[None]) -> None:
    """Await moves; nobody looks at how they have ended before the gateway ends."""
    try:
        await moves
    except Exception:
        _log.exception("moves have ended")


def _are_missing(keys: KeyStore) -> bool:
    """True if there never was a key. While the storage is away, nobody knows, and nobody comes in."""
    try:
        return keys.read() is None
    except Unavailable:
        return False


async def _started(servers: Sequence[uvicorn.Server], serving: Sequence[asyncio.Future[None]]) -> None:
    """Return when all serve, or one has ended; raises what that raised."""
    while not all(server.started for server in servers):
        ended, _ = await asyncio.wait(serving, timeout=0.01, return_when=asyncio.FIRST_COMPLETED)
        if ended:
            await asyncio.gather(*ended)
            return


class _Server(uvicorn.Server):
    """uvicorn's server, which leaves signals to the gateway, and resets no connection when it ends."""

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Accept the connections that wait in the kernel, which would reset them; then as uvicorn does."""
        while accepted := [connection for one in sockets or () for connection in _accepted(one)]:
            loop = asyncio.get_running_loop()
            kind: Any = self.config.http_protocol_class
            protocol = functools.partial(kind, self.config, self.server_state, self.lifespan.state)
            connecting = [
                asyncio.ensure_future(loop.connect_accepted_socket(protocol, one, ssl=self.config.ssl))
                for one in accepted
            ]
            await asyncio.wait(connecting, timeout=_HANDSHAKE_S)
        await super().shutdown(sockets)

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


def _accepted(listener: socket.socket) -> Iterator[socket.socket]:
    """Connections that nobody has accepted yet."""
    with contextlib.suppress(OSError):  # there are no more, or they have just gone
        while True:
            connection, _ = listener.accept()
            connection.settimeout(0)
            yield connection


@contextlib.contextmanager
def _stopped_by_signals(stop: Callable[[], None]) -> Iterator[None]:
    loop = asyncio.get_running_loop()
    former = {}
    for number in (signal.SIGTERM, signal.SIGINT):
        try:
            loop.add_signal_handler(number, stop)
        except NotImplementedError:  # on Windows
            former[number] = signal.signal(number, lambda *_: loop.call_soon_threadsafe(stop))
    try:
        yield
    finally:
        for number in (signal.SIGTERM, signal.SIGINT):
            if number in former:
                signal.signal(number, former[number])
            else:
                loop.remove_signal_handler(number)


def _listening(settings: GatewaySettings) -> list[socket.socket]:
    """Sockets for clients and for operators; raises ConfigError."""
    if settings.port and settings.port == settings.admin_port:
        raise ConfigError(f"admin_port: {settings.port} is the port of clients, too; give another")
    if not settings.has_admin:
        return [_bound("port", settings.host, settings.port)]
    any_pair = settings.port == 0 and settings.admin_port is None
    for is_last in (*[False] * _PAIR_TRIES * any_pair, True):
        clients = _bound("port", settings.host, settings.port)
        port = clients.getsockname()[1]
        try:
            wanted = port + 1 if settings.admin_port is None else settings.admin_port
            return [clients, _bound("admin_port", settings.host, wanted)]
        except ConfigError:
            clients.close()
            if is_last:
                raise
    raise AssertionError  # unreachable: the last try returns or raises


def _bound(name: str, host: str, port: int) -> socket.socket:
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        bound = socket.socket(family, kind, protocol)  # asyncio sets TCP_NODELAY only where it is named
        try:
            bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            bound.bind(address)
            bound.listen(_BACKLOG)  # at once: until then, another process could have the same port
        except BaseException:
            bound.close()
            raise
    except (OSError, OverflowError, UnicodeError) as error:
        reason = getattr(error, "strerror", None) or error
        if getattr(error, "errno", None) == errno.EADDRINUSE:
            reason = f"{reason}; give another: --{name.replace('_', '-')}, 0 for any free one"
        raise ConfigError(f"{name}: {port} on {host} can't be opened: {reason}") from None
    return bound
