"""report.html: what a compile made of a model, as one page without scripts or outside resources."""

from topo_opt.report_page.page import page

__all__ = ["page"]
