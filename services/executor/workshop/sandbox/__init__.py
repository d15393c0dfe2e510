"""The sandbox: one untrusted child process for each task.

`protocol`: its tasks and its frames. `supervisor`: starts and limits it. `child`: what runs in it. `lockdown`: the rights that it
gives up first.
"""
