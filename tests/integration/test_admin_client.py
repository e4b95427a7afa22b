"""The garbage collector finds administration clients in librdkafka's own threads."""

import subprocess
import sys

# In a process of its own, which librdkafka would abort.
SCENE = """
import gc, sys, threading
from confluent_kafka.admin import AdminClient, NewTopic
from kmqpy.kafka import librdkafka
from kmqpy.kafka.collectable_admin import _dropped
from kmqpy.kafka.settings import KafkaConnection

hand_over = AdminClient._make_topics_result
collected = threading.Event()

def collect_and_hand_over(*arguments):
    gc.collect()  # as any line of Python may cause
    collected.set()
    return hand_over(*arguments)

AdminClient._make_topics_result = staticmethod(collect_and_hand_over)
gc.disable()
cycle = [librdkafka.new_admin(KafkaConnection(bootstrap=sys.argv[1]))]
cycle.append(cycle)
cycle[0].create_topics([NewTopic(sys.argv[2], 1)])
del cycle
assert collected.wait(60)
assert _dropped.qsize() == 1
librdkafka.new_admin(KafkaConnection(bootstrap=sys.argv[1]))
assert _dropped.qsize() == 0
print("goes on")
"""


def test_the_garbage_collector_may_find_a_client_in_its_own_thread(cluster, queue_name):
    command = [sys.executable, "-c", SCENE, cluster.bootstrap, queue_name]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert (ended.returncode, ended.stdout) == (0, "goes on\n"), ended.stderr
