"""Machine descriptions as data; `topo_opt.topology` reads them."""
