"""One keeper process per live sandbox: it owns the mounts, the isolating program and the pipes.

It is process 1 of its own pid namespace and has its own mount namespace, so the kernel itself
removes every process and mount of a sandbox when the keeper dies, however it dies.
Standard library only: a keeper must start in milliseconds.
"""
