"""The sandbox: one untrusted child process for each task. `protocol`: what goes in and comes out; `supervisor`: starts and limits it; `child`: what it does; `lockdown`: what it gives up first."""
