"""Edge networks: a radio, a virtual clock, batteries. Pure functions over devices; no maths of algorithms is here."""
