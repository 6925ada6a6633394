"""The path's inner loops in C (Cython), where a compiler was at hand when this was installed; else Python does it all.

Each takes what is plain and common, and leaves the rest to the Python code that it stands beside: that one has the
rules and the words for what is refused, and tests hold the two to each other. Nothing else depends on which one runs.
"""

try:
    from service.native import bodies, heads, records, texts  # noqa: F401
except ImportError:  # installed without a compiler: half as fast, and otherwise the same
    COMPILED = False
else:
    COMPILED = True
