"""The engine proxy lets through what the VM-autoscaler needs of a Swarm manager's Docker API, and nothing else (docs/security.md).

Access to a manager's socket is root on every machine of the swarm, so the autoscaler does not get it. Only this process has the
socket. It shows nodes, tasks and services, without what could hold secrets, and sets labels `infaas.*` of nodes. It is a process of its
own (`infaas run engine-proxy`) and has no connection to the bus.
"""
