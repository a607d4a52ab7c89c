"""The host service: one storage and one arena for all engines of a host, over a unix socket.

protocol: frames and messages. election: who is the service. connection: one client's requests and what it holds.
service: the process. events: what changed in a scope. client: `Host`, which engines use.
"""
