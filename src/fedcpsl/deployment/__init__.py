"""Federations of real devices over HTTPS: a server that devices call, keys, and what each side's process does.

The server has one address and three paths: devices fetch orders and send answers, and who has a key reads the status.
Nothing that arrives is ever run: a device runs its installed fedcpsl, and a run is started by `fedcpsl serve` alone.
"""
