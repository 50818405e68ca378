"""Tiles by measurement: search spaces, keys, a cache on disk, and the measuring itself.

    kernel --search_space--> tiles --compile_worker--> machine code --gpu_worker--> checked and timed --records--> cache

A choice rests on a measurement of this kernel (now, or earlier: the cache), on one of the same kernel at other sizes
(transfer), or on the cost model alone; the report says which. Without a GPU nothing is measured, and the result depends on
the cost model, the data of the package and the user's cache only.
"""
