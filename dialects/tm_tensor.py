"""Makes the namespace `tm_tensor` importable, which keeps views of its ops cheap (see `topo_opt.dialects`)."""
