"""Federations of real devices over HTTPS: the server's process, the devices' processes, and keys.

Devices connect to the server, fetch instructions and send replies; the operator and devices with a key can read the
status. Received content is never executed: a device runs its installed fedcpsl, and only `fedcpsl serve` starts a run.
"""
