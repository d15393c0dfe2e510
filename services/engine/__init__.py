"""The engine proxy: of a Swarm manager's Docker API it lets through what the VM-autoscaler needs, and nothing else.

Whoever may speak to a manager's socket is root on every machine of the swarm, so the autoscaler does not get it. This process alone
holds the socket; it reads nodes, tasks and services, less what could hold secrets, and sets labels `infaas.*` of nodes. A process of
its own (`infaas run engine-proxy`): it knows no bus. docs/security.md.
"""
