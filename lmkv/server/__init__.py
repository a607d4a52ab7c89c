"""The service: one storage and one arena for all engines of a host, and for other machines over TCP.

Of this host, over a unix socket: protocol: frames and messages. election: who is the service. connection: one client's
requests and what it holds. events: what changed in a scope. client: `Host`, which engines use.

Of other machines: data: messages. stream: a connection with deadlines. tcp: who is let in. remote: one client's
requests. catalog: what the storage holds, by whole keys. peer: a server as its clients see it.

service: the process.
"""
