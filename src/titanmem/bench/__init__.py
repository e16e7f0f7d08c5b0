"""How fast it is, beside its peers: `titanmem bench ops | train | decode | stream | peers`."""
