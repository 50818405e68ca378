"""report.html: what a compile made of a model, as one page without scripts or outside resources."""
