// Native core of topo-opt: graph algorithms on plain arrays. Units and meanings are documented in sim/__init__.py.
#include <nanobind/nanobind.h>

NB_MODULE(_sim, m) { m.doc() = "Native graph algorithms of topo-opt."; }
