"""The gateway: queues of any storage over HTTP, in the dialects of other queue services.

`app` answers requests; `service` does what they ask, over any storage; each file of `dialects` translates
for the clients of one other service. `keys` says who may do what, `discovery` tells clients where we are.
"""
