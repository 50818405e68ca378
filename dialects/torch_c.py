"""Makes the namespace `torch_c` importable, which keeps views of its ops cheap (see `topo_opt.dialects`)."""
