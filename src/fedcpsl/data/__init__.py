"""Readers, partitions and who has labels."""
