"""Curator's own DistributedQueue with lockPath, in this process through JPype.

Nothing calls from the JVM into Python: the serializer, the consumer and the items of a putMulti are method
handles behind Java's interfaces.
"""

from typing import Any

import jpype

from benchmarks.queue_load import BODY
from tests.interop.curator_jvm import QUEUES, start_jvm, started_client

_JVM = ("-Xmx512m", "-Djute.maxbuffer=104857600")
"""Options of the JVM. With the default of jute.maxbuffer, a Java client can't list more than some 50,000
items."""


class Curator:
    """`takers` queues on one connection, or one queue with an executor of as many threads."""

    def __init__(self, hosts: str, path: str, takers: int, *, executor: bool, packed: bool) -> None:
        start_jvm(*_JVM)
        self._client = started_client(hosts)
        self._path = path
        self._takers = takers
        self._executor = executor
        self._packed = packed
        self._handles = jpype.JClass("java.lang.invoke.MethodHandles")
        self._types = jpype.JClass("java.lang.invoke.MethodType")
        self._body = jpype.JArray(jpype.JByte)(BODY)
        self._one = self._builder(None).putInBackground(False).buildQueue()  # noqa: FBT003 - Java's
        self._many = self._builder(None).buildQueue()
        for queue in (self._one, self._many):
            queue.start()

    def put(self, count: int) -> None:
        if count == 1:
            self._one.put(self._body)
        elif self._packed:
            self._one.putMulti(self._items(count))
        else:
            for _ in range(count):
                self._many.put(self._body)
            if not self._many.flushPuts(60, jpype.JClass("java.util.concurrent.TimeUnit").SECONDS):
                raise TimeoutError("puts in the background did not end")

    def consume(self, count: int, timeout: float) -> int:
        latch = jpype.JClass("java.util.concurrent.CountDownLatch")(count)
        threads = jpype.JClass("java.util.concurrent.Executors").newFixedThreadPool(self._takers)
        queues = []
        for _ in range(1 if self._executor else self._takers):
            builder = self._builder(self._consumer(latch)).lockPath(f"{self._path}-locks")
            if self._executor:
                builder = builder.executor(threads)
            queues.append(builder.buildQueue())
        for queue in queues:
            queue.start()
        latch.await_(int(timeout * 1000), jpype.JClass("java.util.concurrent.TimeUnit").MILLISECONDS)
        came = count - int(latch.getCount())
        threads.shutdownNow()  # they were given the whole list, and the queue's close() does not stop them
        for queue in queues:
            queue.close()
        return came

    def close(self) -> None:
        for queue in (self._one, self._many):
            queue.close()
        self._client.close()

    def _builder(self, consumer: Any) -> Any:
        builder = jpype.JClass(QUEUES + "QueueBuilder")
        return builder.builder(self._client, consumer, self._serializer(), self._path)

    def _serializer(self) -> Any:
        """A QueueSerializer for bytes: both of its methods return their argument."""
        object_class = jpype.JClass("java.lang.Object").class_
        array = jpype.JArray(jpype.JObject).class_
        first = self._handles.insertArguments(self._handles.arrayElementGetter(array), 1, jpype.JInt(0))
        reflected = jpype.JClass("java.lang.reflect.Method").class_
        return self._proxy("QueueSerializer", self._handles.dropArguments(first, 0, object_class, reflected))

    def _consumer(self, latch: Any) -> Any:
        """A QueueConsumer that counts `latch` down for each item."""
        object_class = jpype.JClass("java.lang.Object").class_
        no_type = jpype.JClass("java.lang.Void").TYPE
        count_down = self._handles.publicLookup().findVirtual(
            latch.getClass(), "countDown", self._types.methodType(no_type)
        )
        counted = self._handles.filterReturnValue(
            count_down.bindTo(latch), self._handles.constant(object_class, None)
        )
        reflected = jpype.JClass("java.lang.reflect.Method").class_
        array = jpype.JArray(jpype.JObject).class_
        return self._proxy(
            "QueueConsumer", self._handles.dropArguments(counted, 0, object_class, reflected, array)
        )

    def _items(self, count: int) -> Any:
        """A MultiItem of `count` bodies."""
        items = jpype.JClass("java.util.ArrayDeque")([self._body] * count)
        object_class = jpype.JClass("java.lang.Object").class_
        poll = self._handles.publicLookup().findVirtual(
            items.getClass(), "poll", self._types.methodType(object_class)
        )
        proxies = jpype.JClass("java.lang.invoke.MethodHandleProxies")
        return proxies.asInterfaceInstance(jpype.JClass(QUEUES + "MultiItem").class_, poll.bindTo(items))

    def _proxy(self, interface: str, handle: Any) -> Any:
        """An object whose methods all call `handle` with the proxy, the method and the arguments."""
        handler = jpype.JClass("java.lang.reflect.InvocationHandler").class_
        proxies = jpype.JClass("java.lang.invoke.MethodHandleProxies")
        wanted = jpype.JClass(QUEUES + interface).class_
        return jpype.JClass("java.lang.reflect.Proxy").newProxyInstance(
            wanted.getClassLoader(),
            jpype.JArray(jpype.JClass("java.lang.Class"))([wanted]),
            proxies.asInterfaceInstance(handler, handle),
        )
